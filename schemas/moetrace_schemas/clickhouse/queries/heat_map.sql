-- The heat map of layers and experts over time, one row per minute and layer, loads over their mean.
-- param mode = any
-- param hours = 1
-- From the roll-up, so that a month (hours=720) costs little; narrow it with `mode`.
-- Steps: all of that time, warm-up with them: the roll-up by minute does not tell it apart.
SELECT minute, forward_mode, layer, arrayMap(one -> round(one.2 / mean, 2), arraySort(groupArray((expert, pairs)))) AS load_by_expert
FROM
(
    SELECT minute, forward_mode, layer, expert, sum(count) AS pairs,
           avg(sum(count)) OVER (PARTITION BY minute, forward_mode, layer) AS mean
    FROM expert_load_minutes
    WHERE run_id = {run:String} AND count_kind = 'routed' AND ({mode:String} = 'any' OR forward_mode = {mode:String}) AND minute > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
    GROUP BY minute, forward_mode, layer, expert
)
GROUP BY minute, forward_mode, layer, mean
ORDER BY minute, forward_mode, layer
