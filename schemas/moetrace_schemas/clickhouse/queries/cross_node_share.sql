-- What part of the rows stays on the rank, on the node, or crosses nodes?
-- Steps: all that are stored, warm-up left out.
SELECT phase, direction, forward_mode, scope, sum(rows) AS sent,
       round(sum(rows) / sum(sum(rows)) OVER (PARTITION BY phase, direction, forward_mode), 4) AS share,
       formatReadableSize(sum(bytes)) AS size
FROM v_traffic
WHERE run_id = {run:String}
  AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)
GROUP BY phase, direction, forward_mode, scope
ORDER BY phase, direction, forward_mode, scope
