-- What part of the rows stays on the rank, on the node, or crosses nodes?
SELECT phase, direction, forward_mode, scope, sum(rows) AS sent,
       round(sum(rows) / sum(sum(rows)) OVER (PARTITION BY phase, direction, forward_mode), 4) AS share,
       formatReadableSize(sum(bytes)) AS size
FROM v_traffic
WHERE run_id = {run:String}
GROUP BY phase, direction, forward_mode, scope
ORDER BY phase, direction, forward_mode, scope
