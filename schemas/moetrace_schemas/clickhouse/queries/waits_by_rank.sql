-- Who waits for others? The rank that waits least is the one that the others wait for.
-- param minutes = 15
-- Of the run's last minutes, least waiting first.
-- Steps: all of that time, warm-up left out.
SELECT of_rank.1 AS rank, round(sum(of_rank.2) / 1e6, 3) AS in_exchanges_ms,
       round(sum(of_rank.2 - transfer_ns) / 1e6, 3) AS waiting_ms,
       round(sum(of_rank.2 - transfer_ns) / sum(of_rank.2), 4) AS waiting_part
FROM
(
    SELECT groupArray((rank, duration_ns)) AS ranks, min(duration_ns) AS transfer_ns
    FROM phase_spans FINAL
    WHERE run_id = {run:String} AND is_barrier = 1 AND start_time > (SELECT max(last_step_time) FROM v_runs WHERE run_id = {run:String}) - INTERVAL {minutes:UInt32} MINUTE
      AND step NOT IN (SELECT step FROM step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1)
    GROUP BY step, ep_group, layer, phase, direction, microbatch, ordinal
)
ARRAY JOIN ranks AS of_rank
GROUP BY rank
ORDER BY waiting_ms
