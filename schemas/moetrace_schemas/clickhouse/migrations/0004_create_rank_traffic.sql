CREATE TABLE IF NOT EXISTS {database}.rank_traffic {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run',
    step UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Step number',
    layer Int16 CODEC(ZSTD(1)) COMMENT 'MoE layer',
    phase LowCardinality(String) COMMENT 'dispatch or combine',
    forward_mode LowCardinality(String) COMMENT 'train, prefill, decode or mixed',
    source_rank UInt32 CODEC(ZSTD(1)) COMMENT 'Global rank that sent',
    destination_ep_rank UInt32 CODEC(ZSTD(1)) COMMENT 'ep_rank in the sender''s group that received',
    microbatch UInt16 CODEC(ZSTD(1)) COMMENT 'Microbatch',
    rows Int64 CODEC(ZSTD(1)) COMMENT 'Rows sent',
    bytes Int64 CODEC(ZSTD(1)) COMMENT 'Bytes sent',
    source_host LowCardinality(String) COMMENT 'Host of the sender',
    step_time DateTime64(3) CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step (unix time)'
)
ENGINE = {engine:ReplacingMergeTree}
PARTITION BY toDate(step_time)
ORDER BY (run_id, step, layer, phase, source_rank, destination_ep_rank, microbatch)
TTL toDateTime(step_time) + INTERVAL 30 DAY
COMMENT 'Rows and bytes from rank to rank'
