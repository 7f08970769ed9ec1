CREATE TABLE IF NOT EXISTS {database}.schema_migrations {on_cluster}
(
    version UInt32 COMMENT 'Number of the migration file',
    name String COMMENT 'File name',
    checksum String COMMENT 'SHA-256 of the file',
    applied_at DateTime64(3) DEFAULT now64(3) COMMENT 'When it was applied (UTC)'
)
ENGINE = {engine:ReplacingMergeTree}
ORDER BY version
COMMENT 'Applied migrations'
