CREATE MATERIALIZED VIEW IF NOT EXISTS {database}.exchange_minutes_mv {on_cluster} TO {local:exchange_minutes} AS
SELECT
    run_id,
    toStartOfMinute(toDateTime(step_time)) AS minute,
    layer,
    phase,
    direction,
    count() AS exchanges,
    sum(source.transfer_ns) AS transfer_ns,
    max(source.transfer_ns) AS longest_transfer_ns,
    sum(source.wait_sum_ns) AS wait_ns,
    sum(source.extension_ns) AS extension_ns,
    sum(toUInt64(source.ambiguous)) AS ambiguous,
    sumMap(map(toUInt16(floor(8 * log2(greatest(source.transfer_ns, 1)))), toUInt64(1))) AS by_transfer
FROM {local:step_barriers} AS source
WHERE phase IN ('dispatch', 'combine')
GROUP BY run_id, minute, layer, phase, direction
COMMENT 'Fills exchange_minutes from step_barriers'
