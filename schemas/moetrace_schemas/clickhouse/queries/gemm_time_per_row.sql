-- Which rank needs more expert time than its rows explain: tokens against GEMM time?
-- param minutes = 15
-- Of the run's last minutes. Time is a line over rows, fitted over all ranks of a forward mode; `over_expected` is a
-- rank's time over what the line says. `ns_per_row` alone misleads: few rows make a row dear on any device.
-- Steps: all of that time, warm-up left out.
WITH gemms AS
(
    SELECT forward_mode, rank, rows AS worked, duration_ns FROM phase_spans FINAL
    WHERE run_id = {run:String} AND phase = 'expert_gemm' AND rows > 0 AND start_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE
      AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)
)
SELECT forward_mode, rank, sum(worked) AS rows_worked, round(sum(duration_ns) / sum(worked), 2) AS ns_per_row,
       round(sum(duration_ns) / sum(line.1 * worked + line.2), 3) AS over_expected
FROM gemms
INNER JOIN
(
    SELECT forward_mode AS mode, simpleLinearRegression(worked, duration_ns) AS line
    FROM gemms
    GROUP BY mode
) AS fitted ON fitted.mode = gemms.forward_mode
GROUP BY forward_mode, rank
ORDER BY over_expected DESC, forward_mode, rank
