-- Did a placement change help: step time, imbalance over ranks and steps by placement epoch?
-- Steps: all that are stored, warm-up left out.
SELECT placement_version, count() AS steps,
       round(quantileExact(0.5)(step_ns) / 1e6, 3) AS p50_ms, round(quantileExact(0.95)(step_ns) / 1e6, 3) AS p95_ms,
       round(avg(rank_imbalance), 3) AS mean_rank_imbalance
FROM
(
    SELECT step, step_ns FROM step_verdicts FINAL
    WHERE run_id = {run:String} AND warmup = 0 AND empty(missing_ranks)
) AS verdicts
INNER JOIN
(
    SELECT step, max(placement_version) AS placement_version FROM rank_steps FINAL
    WHERE run_id = {run:String} GROUP BY step
) AS placements ON placements.step = verdicts.step
INNER JOIN
(
    SELECT step, avg(rank_max_mean_ratio) AS rank_imbalance FROM v_layer_loads
    WHERE run_id = {run:String} GROUP BY step
) AS loads ON loads.step = verdicts.step
GROUP BY placement_version
ORDER BY placement_version
