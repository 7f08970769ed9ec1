-- How uneven are the rows that ranks receive, per layer: over the mean of all ranks?
-- param hours = 1
-- Of the run's last hours; the 50 most loaded. A rank that received nothing counts into the mean.
-- Steps: all of that time, warm-up with them: the roll-up by minute does not tell it apart.
SELECT forward_mode, layer, rank, received, round(received / mean, 3) AS over_mean
FROM
(
    SELECT forward_mode, layer, rank, sum(count) AS received,
           avg(sum(count)) OVER (PARTITION BY forward_mode, layer) AS mean
    FROM expert_load_minutes
    WHERE run_id = {run:String} AND count_kind = 'received' AND minute > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
    GROUP BY forward_mode, layer, rank
)
ORDER BY over_mean DESC, layer, rank
LIMIT 50
