CREATE OR REPLACE VIEW {database}.exchange_minutes {on_cluster} AS
SELECT run_id, minute, layer, phase, direction, exchanges, transfer_ns, longest_transfer_ns, wait_ns, extension_ns, ambiguous,
       by_transfer, source_rows
FROM {local:exchange_minute_rows} FINAL
COMMENT 'All-to-alls per minute, every row of step_barriers once'
