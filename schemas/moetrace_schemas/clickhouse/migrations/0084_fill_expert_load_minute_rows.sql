INSERT INTO {database}.expert_load_minute_rows
SELECT run_id, minute, layer, count_kind, forward_mode, cohort, placement_version, rank, expert,
       sum(source.count) AS count, 0 AS source_rows
FROM {database}.expert_load_minutes AS source
GROUP BY run_id, count_kind, forward_mode, layer, minute, cohort, placement_version, rank, expert
SETTINGS optimize_aggregation_in_order = 1, max_bytes_before_external_group_by = 1000000000, max_partitions_per_insert_block = 0
