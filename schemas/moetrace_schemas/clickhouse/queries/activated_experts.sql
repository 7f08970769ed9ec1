-- How many experts does each rank wake per step and layer? Decode reads the weights of each.
-- param mode = any
-- param minutes = 15
-- Of the run's last minutes; the 200 (rank, layer) that wake most.
-- Steps: all of that time, warm-up left out.
SELECT forward_mode, rank, layer, round(avg(activated), 2) AS mean_activated, max(activated) AS most_activated, count() AS steps
FROM
(
    SELECT forward_mode, step, rank, layer, countIf(count > 0) AS activated
    FROM expert_loads FINAL
    WHERE run_id = {run:String} AND count_kind = 'received' AND ({mode:String} = 'any' OR forward_mode = {mode:String})
      AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE
      AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)
    GROUP BY forward_mode, step, rank, layer
)
GROUP BY forward_mode, rank, layer
ORDER BY mean_activated DESC, forward_mode, rank, layer
LIMIT 200
