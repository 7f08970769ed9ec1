-- How many pairs are dropped or not counted, by reason and layer?
-- Steps: all that are stored, warm-up with them: the roll-up by minute does not tell it apart.
SELECT layer, count_kind, sum(count) AS pairs,
       round(pairs / any(routed), 6) AS of_routed
FROM (SELECT * FROM expert_load_minutes WHERE run_id = {run:String} AND count_kind NOT IN ('routed', 'received', 'executed', 'physical')) AS others
INNER JOIN (SELECT layer, sum(count) AS routed FROM expert_load_minutes WHERE run_id = {run:String} AND count_kind = 'routed' GROUP BY layer) AS totals
    ON totals.layer = others.layer
GROUP BY layer, count_kind
ORDER BY layer, count_kind
