-- How many pairs are dropped or left out of the counts, by reason and layer?
-- param hours = 24
-- Of the run's last hours; `of_routed` is a part of the pairs that were counted.
-- Steps: all of that time, warm-up with them: the roll-up by minute does not tell it apart.
SELECT forward_mode, layer, count_kind, sum(count) AS pairs, round(pairs / any(routed), 6) AS of_routed
FROM
(
    SELECT forward_mode, layer, count_kind, count FROM expert_load_minutes
    WHERE run_id = {run:String} AND count_kind NOT IN ('routed', 'received', 'executed', 'physical') AND minute > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
) AS others
INNER JOIN
(
    SELECT forward_mode, layer, sum(count) AS routed FROM expert_load_minutes
    WHERE run_id = {run:String} AND count_kind = 'routed' AND minute > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
    GROUP BY forward_mode, layer
) AS totals ON totals.forward_mode = others.forward_mode AND totals.layer = others.layer
GROUP BY forward_mode, layer, count_kind
ORDER BY forward_mode, layer, count_kind
