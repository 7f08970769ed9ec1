CREATE TABLE IF NOT EXISTS {database}.phase_spans {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    step UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Step number',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'MoE layer as the model numbers its blocks; -1 = step level',
    phase LowCardinality(String) COMMENT 'Closed set Phase',
    direction LowCardinality(String) COMMENT 'forward or backward',
    microbatch UInt16 CODEC(ZSTD(1)) COMMENT 'Microbatch',
    ordinal UInt16 CODEC(ZSTD(1)) COMMENT 'Occurrence of (layer, phase, direction, microbatch, barrier) in the step',
    rank UInt32 CODEC(ZSTD(1)) COMMENT 'Global rank',
    is_barrier UInt8 CODEC(ZSTD(1)) COMMENT '1 = the exchange itself (transfer plus wait), 0 = local work',
    ep_group UInt32 CODEC(ZSTD(1)) COMMENT 'Expert-parallel group: its lowest global rank',
    ep_rank UInt32 CODEC(ZSTD(1)) COMMENT 'Rank in the expert-parallel group',
    forward_mode LowCardinality(String) COMMENT 'train, prefill, decode or mixed',
    cohort LowCardinality(String) COMMENT 'Allow-listed traffic cohort',
    stream UInt16 CODEC(ZSTD(1)) COMMENT 'Device stream; 0 = compute',
    flags UInt16 CODEC(ZSTD(1)) COMMENT 'Bits of RowFlag',
    start_time DateTime64(9) CODEC(Delta, ZSTD(1)) COMMENT 'Unix time by the rank''s own clock; for drawing only',
    duration_ns Int64 CODEC(ZSTD(1)) COMMENT 'Duration by the phases'' clock, ns',
    bytes Int64 CODEC(ZSTD(1)) COMMENT 'Payload this rank sent, bytes; -1 = unknown',
    rows Int64 CODEC(ZSTD(1)) COMMENT 'Rows sent or worked on; -1 = unknown'
)
ENGINE = {engine:ReplacingMergeTree}
PARTITION BY toDate(start_time)
ORDER BY (run_id, step, layer, phase, direction, microbatch, ordinal, is_barrier, rank)
TTL toDateTime(start_time) + INTERVAL 30 DAY
COMMENT 'One row per phase interval of one rank'
