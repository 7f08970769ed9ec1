-- Which experts are hot, per forward mode, in the run's last hours?
-- param hours = 1
-- Over the mean of their layer; from the per-minute roll-up, so a month costs little.
-- Steps: all of that time, warm-up with them: the roll-up by minute does not tell it apart.
SELECT forward_mode, layer, expert, pairs, round(pairs / mean, 2) AS over_mean
FROM
(
    SELECT forward_mode, layer, expert, sum(count) AS pairs,
           avg(sum(count)) OVER (PARTITION BY forward_mode, layer) AS mean
    FROM expert_load_minutes
    WHERE run_id = {run:String} AND count_kind = 'routed' AND minute > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
    GROUP BY forward_mode, layer, expert
)
ORDER BY over_mean DESC, forward_mode, layer, expert
LIMIT 20
