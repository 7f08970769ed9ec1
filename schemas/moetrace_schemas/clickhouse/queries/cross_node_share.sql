-- What part of the rows stays on the rank, on the node, or crosses nodes?
-- param minutes = 15
-- Of the run's last minutes. Each direction is a whole of its own: what goes back in training is derived from what
-- went forward (v_backward_traffic), and its bytes are not known.
-- Steps: all of that time, warm-up left out.
SELECT phase, direction, forward_mode, scope, sum(num_rows) AS sent,
       round(sum(num_rows) / sum(sum(num_rows)) OVER (PARTITION BY phase, direction, forward_mode), 4) AS share,
       if(direction = 'forward', formatReadableSize(sum(num_bytes)), NULL) AS size
FROM
(
    SELECT phase, toString(direction) AS direction, forward_mode, scope, rows AS num_rows, bytes AS num_bytes
    FROM v_traffic
    WHERE run_id = {run:String} AND step >= (SELECT min(step) FROM rank_steps WHERE run_id = {run:String}
      AND start_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE)
      AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)
    UNION ALL
    SELECT phase, direction, forward_mode, scope, rows, 0
    FROM v_backward_traffic
    WHERE run_id = {run:String} AND step >= (SELECT min(step) FROM rank_steps WHERE run_id = {run:String}
      AND start_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE)
      AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)
)
GROUP BY phase, direction, forward_mode, scope
ORDER BY phase, direction, forward_mode, scope
