INSERT INTO {database}.phase_minute_rows
SELECT run_id, minute, layer, phase, direction, is_barrier, forward_mode,
       sum(source.intervals) AS intervals, sum(source.duration_ns) AS duration_ns,
       min(source.shortest_ns) AS shortest_ns, max(source.longest_ns) AS longest_ns,
       sumMap(source.by_duration) AS by_duration, 0 AS source_rows
FROM {database}.phase_minutes AS source
GROUP BY run_id, forward_mode, layer, phase, direction, is_barrier, minute
SETTINGS optimize_aggregation_in_order = 1, max_bytes_before_external_group_by = 1000000000, max_partitions_per_insert_block = 0
