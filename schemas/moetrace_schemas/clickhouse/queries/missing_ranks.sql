-- Which ranks are missing, how often, and since when?
SELECT arrayJoin(missing_ranks) AS rank, count() AS steps, min(step) AS first_step, max(step) AS last_step,
       max(step_time) AS last_time
FROM step_verdicts FINAL
WHERE run_id = {run:String}
GROUP BY rank
ORDER BY steps DESC, rank
