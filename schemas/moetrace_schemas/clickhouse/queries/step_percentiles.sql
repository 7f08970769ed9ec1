-- How long are steps: p50, p95, p99 per forward mode, and what part of them somebody extended?
-- param hours = 24
-- Of the run's last hours, warm-up and steps with missing ranks left out, and those that were not judged.
SELECT forward_mode, count() AS steps,
       round(quantileExact(0.5)(step_ns) / 1e6, 3) AS p50_ms, round(quantileExact(0.95)(step_ns) / 1e6, 3) AS p95_ms,
       round(quantileExact(0.99)(step_ns) / 1e6, 3) AS p99_ms,
       round(sum(extension_ns) / sum(step_ns), 4) AS extended_part, countIf(evidence = 'clear') AS clear_verdicts
FROM step_verdicts FINAL
WHERE run_id = {run:String} AND warmup = 0 AND empty(missing_ranks) AND step_ns > 0 AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
GROUP BY forward_mode
ORDER BY forward_mode
