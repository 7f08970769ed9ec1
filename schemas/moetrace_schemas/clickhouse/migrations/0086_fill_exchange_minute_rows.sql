INSERT INTO {database}.exchange_minute_rows
SELECT run_id, minute, layer, phase, direction,
       sum(source.exchanges) AS exchanges, sum(source.transfer_ns) AS transfer_ns,
       max(source.longest_transfer_ns) AS longest_transfer_ns, sum(source.wait_ns) AS wait_ns,
       sum(source.extension_ns) AS extension_ns, sum(source.ambiguous) AS ambiguous,
       sumMap(source.by_transfer) AS by_transfer, 0 AS source_rows
FROM {database}.exchange_minutes AS source
GROUP BY run_id, layer, phase, direction, minute
SETTINGS optimize_aggregation_in_order = 1, max_bytes_before_external_group_by = 1000000000, max_partitions_per_insert_block = 0
