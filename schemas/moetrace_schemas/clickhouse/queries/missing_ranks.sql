-- Which ranks are missing, how often, and since when?
-- param hours = 24
SELECT arrayJoin(missing_ranks) AS rank, count() AS steps, min(step) AS first_step, max(step) AS last_step,
       min(step_time) AS first_time, max(step_time) AS last_time
FROM step_verdicts FINAL
WHERE run_id = {run:String} AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
GROUP BY rank
ORDER BY steps DESC, rank
