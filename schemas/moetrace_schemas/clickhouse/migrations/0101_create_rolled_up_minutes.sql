CREATE TABLE IF NOT EXISTS {database}.rolled_up_minutes {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    minute DateTime CODEC(Delta, ZSTD(1)) COMMENT 'Minute in which rank steps began (UTC)',
    rank_steps UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Rank steps of the minute that the roll-ups hold',
    verdicts UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Verdicts of steps of the minute whose exchanges they hold',
    rolled_up_at DateTime64(3) CODEC(Delta, ZSTD(1)) COMMENT 'When (UTC, by the clock of the store)'
)
ENGINE = {engine:ReplacingMergeTree:rolled_up_at}
PARTITION BY toYYYYMM(minute)
ORDER BY (run_id, minute)
TTL minute + INTERVAL 400 DAY
COMMENT 'Which minutes the roll-ups hold, and of how much: what tells whether a minute must be rolled up again'
