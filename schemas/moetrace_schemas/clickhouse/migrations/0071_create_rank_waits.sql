CREATE TABLE IF NOT EXISTS {database}.rank_waits {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    step UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Step number',
    phase LowCardinality(String) COMMENT 'dispatch or combine',
    forward_mode LowCardinality(String) COMMENT 'train, prefill, decode or mixed',
    ep_group UInt32 CODEC(ZSTD(1)) COMMENT 'Lowest global rank of the expert-parallel group',
    ep_rank UInt32 CODEC(ZSTD(1)) COMMENT 'Expert-parallel rank that waited',
    microbatch UInt16 CODEC(ZSTD(1)) COMMENT 'Microbatch',
    waited_for UInt32 CODEC(ZSTD(1)) COMMENT 'Expert-parallel rank whose rows it waited for',
    cycles UInt64 CODEC(ZSTD(1)) COMMENT 'SM cycles summed over the warps of the kernels: to be compared with each other only',
    step_time DateTime64(3) CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step (unix time)'
)
ENGINE = {engine:ReplacingMergeTree}
PARTITION BY toDate(step_time)
ORDER BY (run_id, step, phase, forward_mode, ep_group, ep_rank, microbatch, waited_for)
TTL toDateTime(step_time) + INTERVAL 30 DAY
COMMENT 'Waits of exchange kernels by pair of ranks: a row of the N x N matrix per rank and phase'
