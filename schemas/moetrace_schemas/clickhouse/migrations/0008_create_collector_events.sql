CREATE TABLE IF NOT EXISTS {database}.collector_events {on_cluster}
(
    time DateTime64(3) DEFAULT now64(3) CODEC(Delta, ZSTD(1)) COMMENT 'When (UTC)',
    run_id LowCardinality(String) COMMENT 'Run, empty where unknown',
    kind LowCardinality(String) COMMENT 'late, duplicate, rejected, partial, started, stopped',
    reason LowCardinality(String) COMMENT 'Closed set of the kind',
    step Nullable(UInt64) COMMENT 'Step where known',
    rank Nullable(UInt32) COMMENT 'Rank where known',
    detail String COMMENT 'One line for people'
)
ENGINE = {engine:MergeTree}
PARTITION BY toDate(time)
ORDER BY (kind, time)
TTL toDateTime(time) + INTERVAL 90 DAY
COMMENT 'What the collector could not join or store as it came'
