CREATE TABLE IF NOT EXISTS {database}.step_verdicts {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    step UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Step number',
    step_time DateTime64(9) CODEC(Delta, ZSTD(1)) COMMENT 'Earliest start over ranks (unix time)',
    forward_mode LowCardinality(String) COMMENT 'train, prefill, decode or mixed',
    evidence LowCardinality(String) COMMENT 'clear, ambiguous or insufficient',
    reason String COMMENT 'Why the evidence is what it is',
    rank Nullable(UInt32) COMMENT 'Named rank; NULL = none can be named',
    layer Nullable(Int16) COMMENT 'Named layer; NULL = spread over layers',
    phase LowCardinality(Nullable(String)) COMMENT 'Named phase',
    cause LowCardinality(String) COMMENT 'Closed set Cause',
    worth_ns Int64 COMMENT 'What the step would give back if the rank were average in the phase, ns',
    share Float64 COMMENT 'worth / summed extension of the step',
    runner_up_rank Nullable(UInt32) COMMENT 'Second largest',
    runner_up_layer Nullable(Int16) COMMENT 'Its layer',
    runner_up_phase LowCardinality(Nullable(String)) COMMENT 'Its phase',
    runner_up_worth_ns Int64 COMMENT 'Its worth, ns',
    step_ns Int64 COMMENT 'Length of the frontier, ns',
    extension_ns Int64 COMMENT 'Sum of extensions over barriers, ns',
    phase_ns Map(LowCardinality(String), Int64) COMMENT 'Frontier by phase, ns; sums to step_ns',
    world_size UInt32 COMMENT 'Ranks expected',
    missing_ranks Array(UInt32) COMMENT 'Ranks that did not arrive',
    closed_by LowCardinality(String) COMMENT 'complete, timeout, evicted or shutdown',
    warmup UInt8 COMMENT '1 = warm-up step'
)
ENGINE = {engine:ReplacingMergeTree}
PARTITION BY toDate(step_time)
ORDER BY (run_id, step)
TTL toDateTime(step_time) + INTERVAL 365 DAY
COMMENT 'One verdict per joined step'
