ALTER TABLE {database}.rank_traffic {on_cluster}
    ADD COLUMN IF NOT EXISTS direction Enum8('forward' = 0, 'backward' = 1) CODEC(ZSTD(1)) COMMENT 'forward or backward',
    MODIFY ORDER BY (run_id, step, layer, phase, source_rank, destination_ep_rank, microbatch, direction)
