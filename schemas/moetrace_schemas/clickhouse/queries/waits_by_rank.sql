-- Who waits for others? The rank that waits least is the one that the others wait for.
-- Steps: all that are stored, warm-up left out.
SELECT rank, round(sum(inside_ns) / 1e6, 3) AS in_exchanges_ms, round(sum(inside_ns - transfer_ns) / 1e6, 3) AS waiting_ms
FROM
(
    SELECT step, rank, ep_group, layer, phase, direction, microbatch, ordinal, duration_ns AS inside_ns,
           min(duration_ns) OVER (PARTITION BY step, ep_group, layer, phase, direction, microbatch, ordinal) AS transfer_ns
    FROM phase_spans FINAL
    WHERE run_id = {run:String} AND is_barrier = 1
      AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)
)
GROUP BY rank
ORDER BY waiting_ms
