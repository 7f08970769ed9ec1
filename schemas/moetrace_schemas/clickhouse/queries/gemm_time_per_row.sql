-- Which rank needs more expert time per row than the others: tokens against GEMM time?
-- Steps: all that are stored, warm-up left out.
SELECT rank, sum(worked) AS rows_worked, round(sum(duration_ns) / sum(worked), 2) AS ns_per_row,
       round(ns_per_row / median(ns_per_row) OVER (), 3) AS over_median, round(corr(worked, duration_ns), 3) AS correlation
FROM
(
    SELECT rank, rows AS worked, duration_ns FROM phase_spans FINAL
    WHERE run_id = {run:String} AND phase = 'expert_gemm' AND rows > 0
      AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)
)
GROUP BY rank
ORDER BY ns_per_row DESC
