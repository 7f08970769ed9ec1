CREATE TABLE IF NOT EXISTS {database}.unfolded_expert_loads {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    step UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Step number',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'MoE layer',
    count_kind LowCardinality(String) COMMENT 'Closed set CountKind: routed, padding, invalid, dropped, received, recompute',
    forward_mode LowCardinality(String) COMMENT 'train, prefill, decode or mixed',
    cohort LowCardinality(String) COMMENT 'Allow-listed traffic cohort',
    rank UInt32 CODEC(ZSTD(1)) COMMENT 'Global rank that counted',
    microbatch UInt16 CODEC(ZSTD(1)) COMMENT 'Microbatch',
    expert UInt32 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Number as it was counted: a physical or a logical expert',
    count Int64 CODEC(ZSTD(1)) COMMENT '(token, slot) pairs on the source side; rows on the destination side for received',
    placement_version UInt32 CODEC(ZSTD(1)) COMMENT 'Placement epoch; 0 = unknown',
    step_time DateTime64(3) CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step (unix time)'
)
ENGINE = {engine:ReplacingMergeTree}
PARTITION BY toDate(step_time)
ORDER BY (run_id, step, layer, count_kind, forward_mode, rank, microbatch, expert)
TTL toDateTime(step_time) + INTERVAL 7 DAY
COMMENT 'Counts that a collector with --join=store could not number by logical experts, because it did not know the map of their placement version: moetrace join does, and writes them to expert_loads'
