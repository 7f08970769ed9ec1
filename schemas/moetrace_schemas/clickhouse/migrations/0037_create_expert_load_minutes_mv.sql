CREATE MATERIALIZED VIEW IF NOT EXISTS {database}.expert_load_minutes_mv {on_cluster} TO {local:expert_load_minutes} AS
SELECT
    run_id,
    toStartOfMinute(toDateTime(step_time)) AS minute,
    layer,
    count_kind,
    forward_mode,
    cohort,
    placement_version,
    if(count_kind = 'received', toInt32(source.rank), -1) AS rank,
    expert,
    sum(source.count) AS count
FROM {local:expert_loads} AS source
GROUP BY run_id, minute, layer, count_kind, forward_mode, cohort, placement_version, rank, expert
COMMENT 'Fills expert_load_minutes from expert_loads'
