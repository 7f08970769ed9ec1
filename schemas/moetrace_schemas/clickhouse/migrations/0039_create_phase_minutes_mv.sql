CREATE MATERIALIZED VIEW IF NOT EXISTS {database}.phase_minutes_mv {on_cluster} TO {local:phase_minutes} AS
SELECT
    run_id,
    toStartOfMinute(toDateTime(start_time)) AS minute,
    layer,
    phase,
    direction,
    is_barrier,
    forward_mode,
    count() AS intervals,
    sum(source.duration_ns) AS duration_ns,
    min(source.duration_ns) AS shortest_ns,
    max(source.duration_ns) AS longest_ns,
    sumMap(map(toUInt16(floor(8 * log2(greatest(source.duration_ns, 1)))), toUInt64(1))) AS by_duration
FROM {local:phase_spans} AS source
GROUP BY run_id, minute, layer, phase, direction, is_barrier, forward_mode
COMMENT 'Fills phase_minutes from phase_spans'
