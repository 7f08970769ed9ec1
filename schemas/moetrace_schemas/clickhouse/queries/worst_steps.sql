-- Which steps would have given back most, and who was it?
-- Steps: all that are stored, warm-up left out.
SELECT step, step_time, round(step_ns / 1e6, 3) AS step_ms, rank, layer, phase, cause, evidence,
       round(worth_ns / 1e6, 3) AS worth_ms
FROM step_verdicts FINAL
WHERE run_id = {run:String} AND warmup = 0
ORDER BY worth_ns DESC, step
LIMIT 20
