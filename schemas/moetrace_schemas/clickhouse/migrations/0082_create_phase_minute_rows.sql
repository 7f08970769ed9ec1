CREATE TABLE IF NOT EXISTS {database}.phase_minute_rows {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    minute DateTime CODEC(Delta, ZSTD(1)) COMMENT 'Start of the minute (UTC)',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'MoE layer; -1 = step level',
    phase LowCardinality(String) COMMENT 'Closed set Phase',
    direction LowCardinality(String) COMMENT 'forward or backward',
    is_barrier UInt8 CODEC(ZSTD(1)) COMMENT '1 = the exchange itself, 0 = local work',
    forward_mode LowCardinality(String) COMMENT 'train, prefill, decode or mixed',
    intervals UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Rows of phase_spans',
    duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Sum of their durations, ns',
    shortest_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Shortest, ns',
    longest_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Longest, ns',
    by_duration Map(UInt16, UInt64) COMMENT 'Intervals by floor(8 log2(ns)), eight buckets an octave: the middle of a bucket is within 4.5 % of its values',
    source_rows UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Rows of phase_spans that were summed, each once; of two results the one from more rows stays. 0 = summed as rows were written, by a version before: a row delivered twice counted twice'
)
ENGINE = {engine:ReplacingMergeTree:source_rows}
PARTITION BY toYYYYMM(minute)
ORDER BY (run_id, forward_mode, layer, phase, direction, is_barrier, minute)
TTL minute + INTERVAL 400 DAY
COMMENT 'Phase durations over all ranks per minute; read them through phase_minutes'
