-- Which steps would have given back most, and who was it?
-- param hours = 24
-- Steps: all of that time, warm-up left out.
SELECT step, step_time, forward_mode, round(step_ns / 1e6, 3) AS step_ms, rank, layer, phase, cause, evidence,
       round(worth_ns / 1e6, 3) AS worth_ms
FROM step_verdicts FINAL
WHERE run_id = {run:String} AND warmup = 0 AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
ORDER BY worth_ns DESC, step
LIMIT 20
