CREATE OR REPLACE VIEW {database}.expert_load_minutes {on_cluster} AS
SELECT run_id, minute, layer, count_kind, forward_mode, cohort, placement_version, rank, expert, count, source_rows
FROM {local:expert_load_minute_rows} FINAL
COMMENT 'Expert loads per minute, every row of expert_loads once'
