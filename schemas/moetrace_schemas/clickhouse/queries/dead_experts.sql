-- Which experts get no token at all?
-- Steps: all that are stored, warm-up with them: the roll-up by minute does not tell it apart.
SELECT forward_mode, layer, groupArray(expert) AS experts
FROM
(
    SELECT forward_mode, layer, expert
    FROM expert_load_minutes
    WHERE run_id = {run:String} AND count_kind = 'routed'
    GROUP BY forward_mode, layer, expert
    HAVING sum(count) = 0
    ORDER BY expert
)
GROUP BY forward_mode, layer
ORDER BY forward_mode, layer
