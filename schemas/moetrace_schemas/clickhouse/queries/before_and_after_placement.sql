-- Did a placement change help: step time, imbalance over ranks and steps by placement epoch and forward mode?
-- param hours = 24
-- Of the run's last hours. `moetrace placement compare` says whether a difference is more than chance.
-- Steps: all of that time, warm-up left out, and those with missing ranks or without a verdict.
SELECT placement_version, forward_mode, count() AS steps,
       round(quantileExact(0.5)(step_ns) / 1e6, 3) AS p50_ms, round(quantileExact(0.95)(step_ns) / 1e6, 3) AS p95_ms,
       round(avg(rank_imbalance), 3) AS mean_rank_imbalance
FROM
(
    SELECT step, forward_mode, step_ns FROM step_verdicts FINAL
    WHERE run_id = {run:String} AND warmup = 0 AND empty(missing_ranks) AND step_ns > 0 AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
) AS verdicts
INNER JOIN
(
    SELECT step, max(placement_version) AS placement_version FROM rank_steps FINAL
    WHERE run_id = {run:String} AND start_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
    GROUP BY step
) AS placements ON placements.step = verdicts.step
INNER JOIN
(
    SELECT step, avg(rank_max_mean_ratio) AS rank_imbalance FROM v_layer_loads
    WHERE run_id = {run:String} AND step >= (SELECT min(step) FROM rank_steps WHERE run_id = {run:String}
      AND start_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR)
    GROUP BY step
) AS loads ON loads.step = verdicts.step
GROUP BY placement_version, forward_mode
ORDER BY forward_mode, placement_version
