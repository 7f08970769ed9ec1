ALTER TABLE {database}.rank_steps {on_cluster}
    ADD COLUMN IF NOT EXISTS expected_sites UInt32 DEFAULT 0 CODEC(ZSTD(1)) COMMENT 'Wrapped call sites that should have fired; 0 = unknown',
    ADD COLUMN IF NOT EXISTS seen_sites UInt32 DEFAULT 0 CODEC(ZSTD(1)) COMMENT 'Those of them that did'
