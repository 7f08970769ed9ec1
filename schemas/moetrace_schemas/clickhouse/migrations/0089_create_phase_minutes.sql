CREATE OR REPLACE VIEW {database}.phase_minutes {on_cluster} AS
SELECT run_id, minute, layer, phase, direction, is_barrier, forward_mode, intervals, duration_ns, shortest_ns, longest_ns,
       by_duration, source_rows
FROM {local:phase_minute_rows} FINAL
COMMENT 'Phase durations over all ranks per minute, every row of phase_spans once'
