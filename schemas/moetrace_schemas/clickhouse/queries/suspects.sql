-- Who costs most over the run: rank, phase and cause, with the host that it is on?
-- Steps: all that are stored, warm-up left out.
SELECT verdicts.rank AS rank, host, phase, cause, count() AS steps, round(sum(worth_ns) / 1e6, 3) AS worth_ms,
       round(sum(worth_ns) / (SELECT sum(step_ns) FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 0), 4) AS part_of_run
FROM (SELECT * FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 0 AND evidence = 'clear' AND rank IS NOT NULL) AS verdicts
LEFT JOIN (SELECT rank, any(host_name) AS host FROM rank_steps FINAL WHERE run_id = {run:String} GROUP BY rank) AS places
    ON places.rank = verdicts.rank
GROUP BY rank, host, phase, cause
ORDER BY worth_ms DESC
LIMIT 20
