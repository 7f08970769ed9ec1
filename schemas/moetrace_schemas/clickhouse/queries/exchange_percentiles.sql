-- How long do dispatch and combine take per layer: p50, p95, p99 of the transfer, and what ranks wait?
-- Steps: all that are stored, warm-up left out.
SELECT layer, phase, count() AS exchanges,
       round(quantileExact(0.5)(transfer_ns) / 1e3, 1) AS p50_us,
       round(quantileExact(0.95)(transfer_ns) / 1e3, 1) AS p95_us,
       round(quantileExact(0.99)(transfer_ns) / 1e3, 1) AS p99_us,
       round(avg(wait_sum_ns) / 1e3, 1) AS mean_wait_us
FROM step_barriers FINAL
WHERE run_id = {run:String} AND phase IN ('dispatch', 'combine')
  AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)
GROUP BY layer, phase
ORDER BY layer, phase
