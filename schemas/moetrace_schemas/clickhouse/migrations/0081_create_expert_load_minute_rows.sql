CREATE TABLE IF NOT EXISTS {database}.expert_load_minute_rows {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    minute DateTime CODEC(Delta, ZSTD(1)) COMMENT 'Start of the minute (UTC)',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'MoE layer',
    count_kind LowCardinality(String) COMMENT 'Closed set CountKind',
    forward_mode LowCardinality(String) COMMENT 'train, prefill, decode or mixed',
    cohort LowCardinality(String) COMMENT 'Allow-listed traffic cohort',
    placement_version UInt32 CODEC(ZSTD(1)) COMMENT 'Placement epoch; 0 = unknown',
    rank Int32 CODEC(ZSTD(1)) COMMENT 'Receiving rank for count_kind received; -1 = summed over ranks',
    expert UInt32 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Logical expert',
    count Int64 CODEC(T64, ZSTD(1)) COMMENT 'Sum of expert_loads.count; zeros stay, so that a dead expert shows',
    source_rows UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Rows of expert_loads that were summed, each once; of two results the one from more rows stays. 0 = summed as rows were written, by a version before: a row delivered twice counted twice'
)
ENGINE = {engine:ReplacingMergeTree:source_rows}
PARTITION BY toYYYYMM(minute)
ORDER BY (run_id, count_kind, forward_mode, layer, minute, cohort, placement_version, rank, expert)
TTL minute + INTERVAL 400 DAY
COMMENT 'Expert loads per minute; read them through expert_load_minutes'
