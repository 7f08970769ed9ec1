CREATE OR REPLACE VIEW {database}.v_expected_traffic {on_cluster} AS
WITH
    records AS
    (
        SELECT run_id, step, rank, microbatch, ep_group, ep_rank, ep_size, toString(host_name) AS host
        FROM {local:rank_steps} FINAL
        WHERE late = 0
    ),
    chosen AS
    (
        SELECT run_id, step, layer, forward_mode, rank, ep_group, ep_rank, ep_size, host, placement_version,
               min(started) AS step_time, max(expert) + 1 AS num_experts, groupArray((expert, pairs)) AS by_expert
        FROM
        (
            SELECT loads.run_id AS run_id, loads.step AS step, loads.layer AS layer, loads.forward_mode AS forward_mode,
                   loads.rank AS rank, loads.placement_version AS placement_version, loads.expert AS expert,
                   records.ep_group AS ep_group, records.ep_rank AS ep_rank, records.ep_size AS ep_size,
                   records.host AS host, min(loads.step_time) AS started,
                   sum(if(loads.count_kind = 'dropped', -loads.count, loads.count)) AS pairs
            FROM (SELECT * FROM {local:expert_loads} FINAL WHERE count_kind IN ('routed', 'padding', 'dropped')) AS loads
            INNER JOIN records ON records.run_id = loads.run_id AND records.step = loads.step
                AND records.rank = loads.rank AND records.microbatch = loads.microbatch
            WHERE records.ep_size > 1
            GROUP BY run_id, step, layer, forward_mode, rank, placement_version, expert, ep_group, ep_rank, ep_size, host
        )
        GROUP BY run_id, step, layer, forward_mode, rank, ep_group, ep_rank, ep_size, host, placement_version
    ),
    slots AS
    (
        SELECT run_id, version, layer, toUInt32(expert) AS expert, groupArray(ep_rank) AS homes
        FROM {database}.placement_slots FINAL
        WHERE placement_slots.expert >= 0
        GROUP BY run_id, version, layer, expert
    ),
    sent AS
    (
        SELECT run_id, step, layer, forward_mode, rank, ep_group, ep_rank, host, destination_ep_rank,
               min(step_time) AS step_time, sum(pairs / length(homes)) AS rows, max(length(homes) > 1) AS is_split
        FROM
        (
            SELECT pairs_of.run_id AS run_id, pairs_of.step AS step, pairs_of.layer AS layer,
                   pairs_of.forward_mode AS forward_mode, pairs_of.rank AS rank, pairs_of.ep_group AS ep_group,
                   pairs_of.ep_rank AS ep_rank, pairs_of.host AS host, pairs_of.step_time AS step_time,
                   pairs_of.one.2 AS pairs,
                   multiIf(notEmpty(slots.homes), slots.homes,
                       pairs_of.placement_version = 0 AND pairs_of.num_experts % pairs_of.ep_size = 0,
                       [toUInt32(intDiv(pairs_of.one.1 * pairs_of.ep_size, pairs_of.num_experts))],
                       []) AS homes
            FROM (SELECT *, arrayJoin(by_expert) AS one, one.1 AS expert FROM chosen) AS pairs_of
            LEFT JOIN slots ON slots.run_id = pairs_of.run_id AND slots.version = pairs_of.placement_version
                AND slots.layer = pairs_of.layer AND slots.expert = pairs_of.expert
        )
        ARRAY JOIN homes AS destination_ep_rank
        GROUP BY run_id, step, layer, forward_mode, rank, ep_group, ep_rank, host, destination_ep_rank
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
    'dispatch' AS phase,
    'forward' AS direction,
    sent.forward_mode AS forward_mode,
    sent.rank AS source_rank,
    if(places.is_here, toNullable(places.there.1), NULL) AS destination_rank,
    sent.destination_ep_rank AS destination_ep_rank,
    sent.host AS source_host,
    places.there.2 AS destination_host,
    multiIf(sent.ep_rank = sent.destination_ep_rank, 'same_rank',
        sent.host = '' OR destination_host = '', 'unknown',
        sent.host = destination_host, 'same_node',
        'cross_node') AS scope,
    sent.rows AS rows,
    toUInt8(sent.is_split) AS is_split
FROM sent
LEFT JOIN (SELECT *, toUInt8(1) AS is_here FROM places) AS places
    ON places.run_id = sent.run_id AND places.step = sent.step
    AND places.ep_group = sent.ep_group AND places.ep_rank = sent.destination_ep_rank
COMMENT 'Rows that each rank should send to each other one, from what its router chose (with padding, without dropped) and where the placement holds the experts; without a placement they lie in order. Several copies of an expert share its rows evenly (is_split = 1). A dispatcher that sends a token once per rank sends fewer. Bytes are not known'
