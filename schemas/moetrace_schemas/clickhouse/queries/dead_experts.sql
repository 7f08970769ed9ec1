-- Which experts got no token at all in the run's last hours?
-- param hours = 1
-- Steps: all of that time, warm-up with them: the roll-up by minute does not tell it apart.
SELECT forward_mode, layer, count() AS dead, groupArray(expert) AS experts
FROM
(
    SELECT forward_mode, layer, expert
    FROM expert_load_minutes
    WHERE run_id = {run:String} AND count_kind = 'routed' AND minute > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {hours:UInt32} HOUR
    GROUP BY forward_mode, layer, expert
    HAVING sum(count) = 0
    ORDER BY expert
)
GROUP BY forward_mode, layer
ORDER BY forward_mode, layer
