CREATE TABLE IF NOT EXISTS {database}.exchange_minutes {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    minute DateTime CODEC(Delta, ZSTD(1)) COMMENT 'Start of the minute (UTC)',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'Layer of the exchange',
    phase LowCardinality(String) COMMENT 'dispatch or combine',
    direction LowCardinality(String) COMMENT 'forward or backward',
    exchanges SimpleAggregateFunction(sum, UInt64) CODEC(T64, ZSTD(1)) COMMENT 'Exchanges of joined steps, one per expert-parallel group',
    transfer_ns SimpleAggregateFunction(sum, Int64) CODEC(T64, ZSTD(1)) COMMENT 'Transfers, ns',
    longest_transfer_ns SimpleAggregateFunction(max, Int64) CODEC(T64, ZSTD(1)) COMMENT 'Longest transfer, ns',
    wait_ns SimpleAggregateFunction(sum, Int64) CODEC(T64, ZSTD(1)) COMMENT 'Waits summed over ranks, ns',
    extension_ns SimpleAggregateFunction(sum, Int64) CODEC(T64, ZSTD(1)) COMMENT 'Extensions, ns',
    ambiguous SimpleAggregateFunction(sum, UInt64) CODEC(T64, ZSTD(1)) COMMENT 'Exchanges whose waits and work disagree',
    by_transfer SimpleAggregateFunction(sumMap, Map(UInt16, UInt64)) COMMENT 'Exchanges by floor(8 log2(transfer ns)), as phase_minutes.by_duration'
)
ENGINE = {engine:AggregatingMergeTree}
PARTITION BY toYYYYMM(minute)
ORDER BY (run_id, layer, phase, direction, minute)
TTL minute + INTERVAL 400 DAY
COMMENT 'All-to-alls per minute, filled from step_barriers as it is written. A row delivered twice counts twice here'
