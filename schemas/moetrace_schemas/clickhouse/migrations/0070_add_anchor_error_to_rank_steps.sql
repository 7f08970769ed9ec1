ALTER TABLE {database}.rank_steps {on_cluster}
    ADD COLUMN IF NOT EXISTS anchor_error_ns Int64 DEFAULT -1 CODEC(ZSTD(1)) COMMENT 'How far off start_time may be where device events were tied to unix time; -1 = by the clock of the host'
