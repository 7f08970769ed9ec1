CREATE TABLE IF NOT EXISTS {database}.placement_ledger {on_cluster}
(
    run_id LowCardinality(String) COMMENT 'Run; every run has a chain of its own',
    sequence UInt64 COMMENT 'Number of the row in the chain, from 0',
    time DateTime64(3) CODEC(Delta, ZSTD(1)) COMMENT 'When the row was written (UTC)',
    event LowCardinality(String) COMMENT 'proposed, announced, applied or judged',
    version UInt32 COMMENT 'Placement epoch that the row is about',
    previous_version UInt32 COMMENT 'Epoch in force before it; 0 = unknown',
    rollback_version UInt32 COMMENT 'Epoch to go back to if it regresses; 0 = unknown',
    step Nullable(UInt64) COMMENT 'First step of the epoch, where known',
    digest String COMMENT 'SHA-256 of the mapping, hex; empty where no mapping was told',
    policy_version LowCardinality(String) COMMENT 'Version of the policy that chose the mapping',
    proposed_by LowCardinality(String) COMMENT 'Name of the service that proposed it',
    memory LowCardinality(String) COMMENT 'fits, does_not_fit or unknown',
    experts_copied Nullable(UInt64) COMMENT 'Experts that ranks must fetch, over all layers; NULL = the mapping before is not known',
    copied_bytes Nullable(UInt64) COMMENT 'Weights of those; NULL = size of an expert not told',
    replicas_added Nullable(Int64) COMMENT 'Change of filled slots, over all layers',
    verdict LowCardinality(String) COMMENT 'accepted, regressed or not_enough_evidence in rows of event judged, else empty',
    document String CODEC(ZSTD(3)) COMMENT 'Everything else as canonical JSON: mapping, terms, migration plan, comparison',
    previous_hash String COMMENT 'row_hash of the row before in the chain; 64 zeros in the first',
    row_hash String COMMENT 'SHA-256 over the canonical JSON of all other columns, hex'
)
ENGINE = {engine:MergeTree}
ORDER BY (run_id, sequence)
COMMENT 'Append-only, hash-chained record of every placement change; verified by moetrace placement verify'
