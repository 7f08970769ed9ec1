-- Who costs most: rank, phase and cause, with the host that it is on?
-- param hours = 24
-- Of the run's last hours, clear verdicts only; `part_of_run` is of the time of all its steps.
-- Steps: all of that time, warm-up left out.
SELECT verdicts.rank AS rank, host, phase, cause, count() AS steps, round(sum(worth_ns) / 1e6, 3) AS worth_ms,
       round(sum(worth_ns) / (SELECT sum(step_ns) FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 0
           AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR), 4) AS part_of_run
FROM
(
    SELECT * FROM step_verdicts FINAL
    WHERE run_id = {run:String} AND warmup = 0 AND evidence = 'clear' AND rank IS NOT NULL AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
) AS verdicts
LEFT JOIN
(
    SELECT rank, argMax(host_name, start_time) AS host FROM rank_steps
    WHERE run_id = {run:String} AND start_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
    GROUP BY rank
) AS places ON places.rank = verdicts.rank
GROUP BY rank, host, phase, cause
ORDER BY worth_ms DESC
LIMIT 20
