CREATE TABLE IF NOT EXISTS {database}.expert_loads {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    step UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Step number',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'MoE layer',
    count_kind LowCardinality(String) COMMENT 'Closed set CountKind: routed, padding, invalid, dropped, received, recompute',
    forward_mode LowCardinality(String) COMMENT 'train, prefill, decode or mixed',
    cohort LowCardinality(String) COMMENT 'Allow-listed traffic cohort',
    rank UInt32 CODEC(ZSTD(1)) COMMENT 'Global rank that counted',
    microbatch UInt16 CODEC(ZSTD(1)) COMMENT 'Microbatch',
    expert UInt32 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Logical expert; 0 for count_kind invalid, which is one total',
    count Int64 CODEC(ZSTD(1)) COMMENT '(token, slot) pairs on the source side; rows on the destination side for received',
    placement_version UInt32 CODEC(ZSTD(1)) COMMENT 'Placement epoch; 0 = unknown',
    step_time DateTime64(3) CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step (unix time)'
)
ENGINE = {engine:ReplacingMergeTree}
PARTITION BY toDate(step_time)
ORDER BY (run_id, step, layer, count_kind, forward_mode, rank, microbatch, expert)
TTL toDateTime(step_time) + INTERVAL 30 DAY
COMMENT 'Counts per logical expert, rank, step and layer; zero counts are kept for routed'
