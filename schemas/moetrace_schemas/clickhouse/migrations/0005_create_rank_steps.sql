CREATE TABLE IF NOT EXISTS {database}.rank_steps {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    step UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Step number',
    rank UInt32 CODEC(ZSTD(1)) COMMENT 'Global rank',
    microbatch UInt16 CODEC(ZSTD(1)) COMMENT 'Microbatch',
    trace_id FixedString(32) COMMENT 'Trace id, hex; the same for all ranks of the step',
    world_size UInt32 CODEC(ZSTD(1)) COMMENT 'Ranks of the run',
    ep_group UInt32 CODEC(ZSTD(1)) COMMENT 'Expert-parallel group: its lowest global rank',
    ep_rank UInt32 CODEC(ZSTD(1)) COMMENT 'Rank in the group',
    ep_size UInt32 CODEC(ZSTD(1)) COMMENT 'Size of the group',
    forward_mode LowCardinality(String) COMMENT 'train, prefill, decode or mixed',
    cohort LowCardinality(String) COMMENT 'Allow-listed traffic cohort',
    model_name LowCardinality(String) COMMENT 'Model',
    model_version LowCardinality(String) COMMENT 'Model version',
    host_name LowCardinality(String) COMMENT 'Host',
    clock LowCardinality(String) COMMENT 'host or cuda',
    sample_period UInt32 CODEC(ZSTD(1)) COMMENT 'One in this many steps is sampled',
    placement_version UInt32 CODEC(ZSTD(1)) COMMENT 'Placement epoch; 0 = unknown',
    warmup UInt8 CODEC(ZSTD(1)) COMMENT '1 = warm-up step',
    late UInt8 CODEC(ZSTD(1)) COMMENT '1 = arrived after its step had closed',
    start_time DateTime64(9) CODEC(Delta, ZSTD(1)) COMMENT 'Unix time by the rank''s own clock; for drawing only',
    duration_ns Int64 CODEC(ZSTD(1)) COMMENT 'Step duration on this rank, ns'
)
ENGINE = {engine:ReplacingMergeTree}
PARTITION BY toDate(start_time)
ORDER BY (run_id, step, rank, microbatch)
TTL toDateTime(start_time) + INTERVAL 90 DAY
COMMENT 'One row per rank step received'
