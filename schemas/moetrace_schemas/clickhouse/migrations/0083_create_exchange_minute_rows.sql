CREATE TABLE IF NOT EXISTS {database}.exchange_minute_rows {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    minute DateTime CODEC(Delta, ZSTD(1)) COMMENT 'Start of the minute (UTC)',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'Layer of the exchange',
    phase LowCardinality(String) COMMENT 'dispatch or combine',
    direction LowCardinality(String) COMMENT 'forward or backward',
    exchanges UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Exchanges of joined steps, one per expert-parallel group',
    transfer_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Transfers, ns',
    longest_transfer_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Longest transfer, ns',
    wait_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Waits summed over ranks, ns',
    extension_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Extensions, ns',
    ambiguous UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Exchanges whose waits and work disagree',
    by_transfer Map(UInt16, UInt64) COMMENT 'Exchanges by floor(8 log2(transfer ns)), as phase_minutes.by_duration',
    source_rows UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Rows of step_barriers that were summed, each once; of two results the one from more rows stays. 0 = summed as rows were written, by a version before: a row delivered twice counted twice'
)
ENGINE = {engine:ReplacingMergeTree:source_rows}
PARTITION BY toYYYYMM(minute)
ORDER BY (run_id, layer, phase, direction, minute)
TTL minute + INTERVAL 400 DAY
COMMENT 'All-to-alls per minute; read them through exchange_minutes'
