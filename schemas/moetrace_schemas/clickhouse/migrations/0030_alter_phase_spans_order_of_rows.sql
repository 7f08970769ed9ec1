ALTER TABLE {database}.phase_spans {on_cluster}
    ADD COLUMN IF NOT EXISTS record_microbatch UInt16 DEFAULT microbatch CODEC(ZSTD(1)) COMMENT 'Microbatch of the rank step that brought the row (rank_steps.microbatch)',
    ADD COLUMN IF NOT EXISTS position UInt32 DEFAULT 0 CODEC(ZSTD(1)) COMMENT 'Place of the row in its rank step, from 0; tells the order of rows that start together',
    MODIFY COLUMN start_time CODEC(Delta, T64, ZSTD(3)),
    MODIFY COLUMN duration_ns CODEC(T64('bit'), ZSTD(3)),
    MODIFY COLUMN bytes CODEC(T64, ZSTD(3)),
    MODIFY COLUMN rows CODEC(T64, ZSTD(3))
