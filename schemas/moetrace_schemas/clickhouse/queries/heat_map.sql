-- The heat map of layers and experts over time, one row per minute and layer, loads over their mean.
-- Steps: all that are stored, warm-up with them: the roll-up by minute does not tell it apart.
-- param mode = decode
SELECT minute, layer, arrayMap(one -> round(one.2 / mean, 2), arraySort(groupArray((expert, pairs)))) AS load_by_expert
FROM
(
    SELECT minute, layer, expert, sum(count) AS pairs, avg(sum(count)) OVER (PARTITION BY minute, layer) AS mean
    FROM expert_load_minutes
    WHERE run_id = {run:String} AND count_kind = 'routed' AND forward_mode = {mode:String}
    GROUP BY minute, layer, expert
)
GROUP BY minute, layer, mean
ORDER BY minute, layer
LIMIT 1000
