CREATE TABLE IF NOT EXISTS {database}.step_barriers {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    step UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Step number',
    step_time DateTime64(9) CODEC(Delta, ZSTD(1)) COMMENT 'Earliest start over ranks (unix time)',
    ep_group UInt32 CODEC(ZSTD(1)) COMMENT 'Expert-parallel group',
    barrier UInt32 CODEC(ZSTD(1)) COMMENT 'k, in order, from 0',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'Layer of the exchange; -1 = tail of the step',
    phase LowCardinality(String) COMMENT 'dispatch, combine, or outside for the tail',
    direction LowCardinality(String) COMMENT 'forward or backward',
    microbatch UInt16 CODEC(ZSTD(1)) COMMENT 'Microbatch',
    ordinal UInt16 CODEC(ZSTD(1)) COMMENT 'Ordinal of the exchange',
    releaser_rank Int32 CODEC(ZSTD(1)) COMMENT 'Rank that waited least; -1 = cannot be told',
    work_phase LowCardinality(String) COMMENT 'Phase of the releaser''s largest excess',
    transfer_ns Int64 CODEC(ZSTD(1)) COMMENT 'Shortest duration over ranks, ns (a lower bound of the transfer)',
    max_work_ns Int64 CODEC(ZSTD(1)) COMMENT 'Longest local work before the exchange, ns',
    mean_work_ns Int64 CODEC(ZSTD(1)) COMMENT 'Mean local work, ns',
    extension_ns Int64 CODEC(ZSTD(1)) COMMENT 'max - mean, ns',
    wait_sum_ns Int64 CODEC(ZSTD(1)) COMMENT 'Waits summed over ranks, ns',
    ambiguous UInt8 CODEC(ZSTD(1)) COMMENT '1 = waits and work disagree'
)
ENGINE = {engine:ReplacingMergeTree}
PARTITION BY toDate(step_time)
ORDER BY (run_id, step, ep_group, barrier)
TTL toDateTime(step_time) + INTERVAL 90 DAY
COMMENT 'One row per exchange of a joined step'
