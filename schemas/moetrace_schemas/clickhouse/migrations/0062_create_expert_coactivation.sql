CREATE TABLE IF NOT EXISTS {database}.expert_coactivation {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    step UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Step number',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'MoE layer of the first expert',
    span LowCardinality(String) COMMENT 'within: both of this layer, first < second; across: the second of the next MoE layer',
    forward_mode LowCardinality(String) COMMENT 'train, prefill, decode or mixed',
    cohort LowCardinality(String) COMMENT 'Allow-listed traffic cohort',
    rank UInt32 CODEC(ZSTD(1)) COMMENT 'Global rank whose tokens were counted',
    microbatch UInt16 CODEC(ZSTD(1)) COMMENT 'Microbatch',
    first UInt16 CODEC(ZSTD(1)) COMMENT 'Logical expert',
    second UInt16 CODEC(ZSTD(1)) COMMENT 'Logical expert',
    tokens UInt32 CODEC(ZSTD(1)) COMMENT 'Tokens that both serve, padding left out',
    step_time DateTime64(3) CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step (unix time)'
)
ENGINE = {engine:ReplacingMergeTree}
PARTITION BY toDate(step_time)
ORDER BY (run_id, step, layer, span, forward_mode, rank, microbatch, first, second)
TTL toDateTime(step_time) + INTERVAL 30 DAY
COMMENT 'Experts that serve the same tokens, of sampled steps and layers'
