-- Which rank do exchange kernels wait for, pair by pair, where the dispatcher counts it (DeepEP)?
-- param minutes = 15
-- Of the run's last minutes, the 50 pairs that waited longest over the mean of their group. Cycles are only to be
-- compared with each other. A rank in `waited_for` with all others is slow or late; one pair alone is a link.
SELECT phase, forward_mode, waiting.rank AS rank, waiting.host AS host, other.rank AS waited_for, other.host AS other_host,
       cycles, round(cycles / mean, 2) AS over_mean
FROM
(
    SELECT phase, forward_mode, ep_group, ep_rank, waited_for AS other_ep_rank, sum(cycles_of.cycles) AS cycles,
           avg(sum(cycles_of.cycles)) OVER (PARTITION BY phase, forward_mode, ep_group) AS mean
    FROM (SELECT * FROM rank_waits FINAL WHERE run_id = {run:String} AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE) AS cycles_of
    WHERE waited_for != ep_rank
    GROUP BY phase, forward_mode, ep_group, ep_rank, other_ep_rank
) AS pairs
INNER JOIN
(
    SELECT ep_group, ep_rank, argMax(rank, start_time) AS rank, argMax(host_name, start_time) AS host FROM rank_steps
    WHERE run_id = {run:String} AND start_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE
    GROUP BY ep_group, ep_rank
) AS waiting ON waiting.ep_group = pairs.ep_group AND waiting.ep_rank = pairs.ep_rank
INNER JOIN
(
    SELECT ep_group, ep_rank, argMax(rank, start_time) AS rank, argMax(host_name, start_time) AS host FROM rank_steps
    WHERE run_id = {run:String} AND start_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE
    GROUP BY ep_group, ep_rank
) AS other ON other.ep_group = pairs.ep_group AND other.ep_rank = pairs.other_ep_rank
ORDER BY over_mean DESC
LIMIT 50
