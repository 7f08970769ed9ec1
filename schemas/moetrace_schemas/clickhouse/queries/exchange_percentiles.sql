-- How long do dispatch and combine take per layer: p50, p95, p99 of the transfer, and what ranks wait?
-- param minutes = 60
-- Of the run's last minutes. One exchange is one of one expert-parallel group; its waits are summed over ranks.
-- Steps: all of that time, warm-up left out.
SELECT forward_mode, layer, phase, direction, count() AS exchanges,
       round(quantileExact(0.5)(transfer_ns) / 1e3, 1) AS p50_us,
       round(quantileExact(0.95)(transfer_ns) / 1e3, 1) AS p95_us,
       round(quantileExact(0.99)(transfer_ns) / 1e3, 1) AS p99_us,
       round(avg(wait_sum_ns) / 1e3, 1) AS mean_wait_us
FROM
(
    SELECT step, layer, phase, direction, transfer_ns, wait_sum_ns FROM step_barriers FINAL
    WHERE run_id = {run:String} AND phase IN ('dispatch', 'combine') AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE
) AS barriers
INNER JOIN
(
    SELECT step, forward_mode FROM step_verdicts FINAL
    WHERE run_id = {run:String} AND warmup = 0 AND step_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE
) AS verdicts ON verdicts.step = barriers.step
GROUP BY forward_mode, layer, phase, direction
ORDER BY forward_mode, layer, phase, direction
