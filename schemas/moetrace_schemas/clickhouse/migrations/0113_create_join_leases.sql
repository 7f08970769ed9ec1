CREATE TABLE IF NOT EXISTS {database}.join_leases {on_cluster}
(
    holder String COMMENT 'A moetrace join: host, pid and a number of its own',
    run_id String COMMENT 'The run that it joins; empty: all',
    begun_at DateTime64(6) COMMENT 'Since when it is at work or stands by (UTC, by the clock of the store)',
    beat_at DateTime64(6) COMMENT 'Its last sign of life (UTC, by the clock of the store)',
    has_left UInt8 COMMENT '1 = it has ended'
)
ENGINE = {engine:ReplacingMergeTree:beat_at}
ORDER BY holder
TTL toDateTime(beat_at) + INTERVAL 1 DAY
COMMENT 'Which moetrace join is at work: of those that live the one that began first; the others stand by'
