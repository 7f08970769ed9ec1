ALTER TABLE {database}.rank_steps {on_cluster}
    ADD COLUMN IF NOT EXISTS received_at DateTime64(3) CODEC(Delta, ZSTD(1)) COMMENT 'When a collector wrote it (UTC, its clock); 1970 in rows of older versions',
    ADD INDEX IF NOT EXISTS received_at_range received_at TYPE minmax GRANULARITY 1
