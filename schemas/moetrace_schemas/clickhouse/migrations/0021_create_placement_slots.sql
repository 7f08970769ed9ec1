CREATE TABLE IF NOT EXISTS {database}.placement_slots {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    version UInt32 COMMENT 'Placement epoch',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'MoE layer',
    slot UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Physical expert; slots are numbered rank by rank',
    ep_rank UInt32 CODEC(ZSTD(1)) COMMENT 'Expert-parallel rank that has the slot',
    expert Int32 CODEC(ZSTD(1)) COMMENT 'Logical expert in it; -1 = empty'
)
ENGINE = {engine:ReplacingMergeTree}
ORDER BY (run_id, version, layer, slot)
COMMENT 'Physical to logical experts of each placement epoch'
