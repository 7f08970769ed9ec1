-- In which steps did a rank extend the step, and why?
-- Steps: all that are stored, warm-up left out.
-- param rank = 7
SELECT step, step_time, phase, layer, cause, evidence, round(worth_ns / 1e6, 3) AS worth_ms, reason
FROM step_verdicts FINAL
WHERE run_id = {run:String} AND rank = {rank:UInt32} AND warmup = 0
ORDER BY worth_ns DESC
LIMIT 100
