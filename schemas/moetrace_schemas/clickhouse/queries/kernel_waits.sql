-- Which rank's rows made a rank wait in the exchange kernels?
-- Of runs whose exchange kernels tell their waits (wait_stats); cycles compare ranks and are no time.
-- The rank that most others wait for longest is late, or its link is slow; a pair alone points at a link.
-- param rank = 0
-- param minutes = 60
-- Of the run's last minutes.
-- Steps: all of that time, warm-up left out.
WITH places AS
(
    SELECT ep_group, ep_rank, any(rank) AS rank
    FROM rank_steps FINAL
    WHERE run_id = {run:String} AND start_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE
    GROUP BY ep_group, ep_rank
)
SELECT phase, ep_group, late.rank AS waited_for_rank, sum(cycles) AS waited_cycles,
       round(sum(cycles) / sum(sum(cycles)) OVER (PARTITION BY phase, ep_group), 4) AS part,
       round(sum(cycles) / nullIf(avg(sum(cycles)) OVER (PARTITION BY phase, ep_group), 0), 3) AS over_mean,
       uniqExact(step) AS steps
FROM (SELECT * FROM rank_waits FINAL WHERE run_id = {run:String} AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE
      AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)) AS waits
INNER JOIN places AS waiting ON waiting.ep_group = waits.ep_group AND waiting.ep_rank = waits.ep_rank
INNER JOIN places AS late ON late.ep_group = waits.ep_group AND late.ep_rank = waits.waited_for
WHERE waiting.rank = {rank:UInt32} AND waits.waited_for != waits.ep_rank
GROUP BY phase, ep_group, late.rank
ORDER BY phase, waited_cycles DESC
