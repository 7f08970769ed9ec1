ALTER TABLE {database}.rank_steps {on_cluster}
    ADD COLUMN IF NOT EXISTS tracer_ns Int64 DEFAULT -1 CODEC(ZSTD(1)) COMMENT 'Estimated host time that the tracer took on the model''s thread, ns; -1 = not said'
