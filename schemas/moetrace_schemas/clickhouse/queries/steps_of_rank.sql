-- In which steps did a rank extend the step, and why?
-- Steps: all that are stored, warm-up left out.
-- param rank = 7
-- param hours = 24
-- Of the run's last hours, the 100 that it cost most. Evidence `clear` is what an alert counts.
SELECT step, step_time, forward_mode, phase, layer, cause, evidence, round(worth_ns / 1e6, 3) AS worth_ms, reason
FROM step_verdicts FINAL
WHERE run_id = {run:String} AND rank = {rank:UInt32} AND warmup = 0 AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
ORDER BY worth_ns DESC
LIMIT 100
