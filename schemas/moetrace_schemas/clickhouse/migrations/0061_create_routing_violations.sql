CREATE TABLE IF NOT EXISTS {database}.routing_violations {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    step UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Step number',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'MoE layer',
    violation LowCardinality(String) COMMENT 'Closed set RoutingViolation',
    forward_mode LowCardinality(String) COMMENT 'train, prefill, decode or mixed',
    scope LowCardinality(String) COMMENT 'rank: seen by the rank itself; group: seen over its expert-parallel group',
    rank UInt32 CODEC(ZSTD(1)) COMMENT 'Global rank; of scope group, the lowest global rank of the group',
    microbatch UInt16 CODEC(ZSTD(1)) COMMENT 'Microbatch',
    count UInt64 CODEC(ZSTD(1)) COMMENT 'How many; the unit is that of the violation',
    step_time DateTime64(3) CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step (unix time)'
)
ENGINE = {engine:ReplacingMergeTree}
PARTITION BY toDate(step_time)
ORDER BY (run_id, step, layer, violation, forward_mode, scope, rank, microbatch)
TTL toDateTime(step_time) + INTERVAL 90 DAY
COMMENT 'Contradictions in routing receipts of checked steps'
