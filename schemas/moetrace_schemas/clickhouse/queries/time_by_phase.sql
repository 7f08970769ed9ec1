-- Where does the time of a step go: phases of the frontier, as parts of it, per forward mode?
-- param hours = 24
-- Of the run's last hours; the mean is over all steps, also those that a phase is not in.
-- Steps: all of that time, warm-up left out.
SELECT forward_mode, phase, round(sum(ns) / any(steps) / 1e6, 3) AS mean_ms, round(sum(ns) / any(total_ns), 4) AS part
FROM
(
    SELECT forward_mode, arrayJoin(phase_ns) AS pair, toString(pair.1) AS phase, pair.2 AS ns
    FROM step_verdicts FINAL
    WHERE run_id = {run:String} AND warmup = 0 AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
) AS phases
INNER JOIN
(
    SELECT forward_mode, count() AS steps, sum(step_ns) AS total_ns
    FROM step_verdicts FINAL
    WHERE run_id = {run:String} AND warmup = 0 AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
    GROUP BY forward_mode
) AS modes ON modes.forward_mode = phases.forward_mode
GROUP BY forward_mode, phase
ORDER BY forward_mode, part DESC
