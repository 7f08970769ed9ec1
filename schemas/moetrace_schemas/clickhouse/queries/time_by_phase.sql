-- Where does the time of a step go: phases of the frontier, as parts of it?
-- Steps: all that are stored, warm-up left out.
SELECT phase, round(avg(ns) / 1e6, 3) AS mean_ms, round(sum(ns) / sum(step_ns), 4) AS part
FROM
(
    SELECT step_ns, arrayJoin(phase_ns) AS pair, toString(pair.1) AS phase, pair.2 AS ns
    FROM step_verdicts FINAL
    WHERE run_id = {run:String} AND warmup = 0
)
GROUP BY phase
ORDER BY part DESC
