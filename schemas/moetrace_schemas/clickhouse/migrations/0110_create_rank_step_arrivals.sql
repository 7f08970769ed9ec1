CREATE TABLE IF NOT EXISTS {database}.rank_step_arrivals {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    step UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Step number',
    rank UInt32 CODEC(ZSTD(1)) COMMENT 'Global rank',
    microbatch UInt16 CODEC(ZSTD(1)) COMMENT 'Microbatch',
    start_time DateTime64(9) CODEC(Delta, ZSTD(1)) COMMENT 'Start by the rank''s own clock; a second one for the same rank and step: it was executed again',
    stored_at SimpleAggregateFunction(min, DateTime64(3)) CODEC(Delta, ZSTD(1)) COMMENT 'When its row was first stored (UTC, by the clock of the store)',
    INDEX stored_at_range stored_at TYPE minmax GRANULARITY 1
)
ENGINE = {engine:AggregatingMergeTree}
PARTITION BY toDate(stored_at)
ORDER BY (run_id, step, rank, microbatch, start_time)
TTL toDateTime(stored_at) + INTERVAL 7 DAY
COMMENT 'When rank steps were stored, filled from rank_steps: where moetrace join finds steps, however long their rows waited before. A row per execution of a step on a rank, also where a later one has replaced it in rank_steps'
