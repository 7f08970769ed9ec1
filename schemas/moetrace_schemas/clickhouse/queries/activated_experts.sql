-- How many experts does each rank wake per step and layer in a forward mode? Decode reads the weights of each.
-- Steps: all that are stored, warm-up left out.
-- param mode = decode
SELECT rank, layer, round(avg(activated), 2) AS mean_activated, max(activated) AS most_activated
FROM
(
    SELECT step, rank, layer, countIf(count > 0) AS activated
    FROM expert_loads FINAL
    WHERE run_id = {run:String} AND count_kind = 'received' AND forward_mode = {mode:String}
      AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)
    GROUP BY step, rank, layer
)
GROUP BY rank, layer
ORDER BY rank, layer
