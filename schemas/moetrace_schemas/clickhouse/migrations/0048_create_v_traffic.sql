CREATE OR REPLACE VIEW {database}.v_traffic {on_cluster} AS
WITH
    records AS
    (
        SELECT run_id, step, rank, microbatch, ep_group, ep_rank, toString(host_name) AS host
        FROM {local:rank_steps} FINAL
        WHERE late = 0
    ),
    sent AS
    (
        SELECT traffic.run_id AS run_id, traffic.step AS step, traffic.layer AS layer, traffic.phase AS phase,
               traffic.direction AS direction, traffic.forward_mode AS forward_mode, traffic.source_rank AS source_rank,
               traffic.destination_ep_rank AS destination_ep_rank,
               records.ep_group AS ep_group, records.ep_rank AS source_ep_rank, records.host AS source_host,
               min(traffic.step_time) AS step_time, sum(traffic.rows) AS rows, sum(traffic.bytes) AS bytes
        FROM (SELECT * FROM {local:rank_traffic} FINAL) AS traffic
        INNER JOIN records ON records.run_id = traffic.run_id AND records.step = traffic.step
            AND records.rank = traffic.source_rank AND records.microbatch = traffic.microbatch
        GROUP BY run_id, step, layer, phase, direction, forward_mode, source_rank, destination_ep_rank,
                 ep_group, source_ep_rank, source_host
    ),
    places AS
    (
        SELECT run_id, step, ep_group, ep_rank, argMax((rank, host), (rank, microbatch)) AS there
        FROM records
        GROUP BY run_id, step, ep_group, ep_rank
    )
SELECT
    sent.run_id AS run_id,
    sent.step AS step,
    sent.step_time AS step_time,
    sent.layer AS layer,
    sent.phase AS phase,
    sent.direction AS direction,
    sent.forward_mode AS forward_mode,
    sent.source_rank AS source_rank,
    if(places.is_here, toNullable(places.there.1), NULL) AS destination_rank,
    sent.destination_ep_rank AS destination_ep_rank,
    sent.source_host AS source_host,
    places.there.2 AS destination_host,
    multiIf(sent.source_ep_rank = sent.destination_ep_rank, 'same_rank',
        sent.source_host = '' OR destination_host = '', 'unknown',
        sent.source_host = destination_host, 'same_node',
        'cross_node') AS scope,
    sent.rows AS rows,
    sent.bytes AS bytes
FROM sent
LEFT JOIN (SELECT *, toUInt8(1) AS is_here FROM places) AS places
    ON places.run_id = sent.run_id AND places.step = sent.step
    AND places.ep_group = sent.ep_group AND places.ep_rank = sent.destination_ep_rank
COMMENT 'Rows and bytes from rank to rank with their hosts, by step, layer, phase and direction'
