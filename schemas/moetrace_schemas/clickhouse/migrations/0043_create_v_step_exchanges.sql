CREATE OR REPLACE VIEW {database}.v_step_exchanges {on_cluster} AS
WITH
    records AS
    (
        SELECT run_id, step, rank, microbatch, ep_group, ep_size, start_time
        FROM {local:rank_steps} FINAL
        WHERE late = 0
    ),
    rank_of_step AS
    (
        SELECT run_id, step, rank, min(ep_group) AS ep_group, max(records.ep_size) AS ep_size,
               min(start_time) AS started
        FROM records
        GROUP BY run_id, step, rank
    ),
    rows_of_rank AS
    (
        SELECT
            spans.run_id AS run_id,
            spans.step AS step,
            spans.rank AS rank,
            arraySort(groupArray((
                toUnixTimestamp64Nano(spans.start_time), spans.record_microbatch, spans.position, spans.duration_ns, spans.layer,
                transform(toString(spans.phase), ['outside', 'router', 'permute', 'dispatch', 'expert_gemm', 'combine', 'unpermute', 'shared_expert', 'fused', 'schedule', 'accept'], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 255),
                toUInt8(spans.direction = 'backward'), spans.microbatch, spans.ordinal, spans.stream, spans.is_barrier
            ))) AS found
        FROM (SELECT * FROM {local:phase_spans} FINAL) AS spans
        INNER JOIN records ON records.run_id = spans.run_id AND records.step = spans.step
            AND records.rank = spans.rank AND records.microbatch = spans.record_microbatch
        GROUP BY run_id, step, rank
    ),
    exposed_rows AS
    (
        SELECT
            rank_of_step.run_id AS run_id,
            rank_of_step.step AS step,
            rank_of_step.rank AS rank,
            rank_of_step.ep_group AS ep_group,
            rank_of_step.ep_size AS ep_size,
            rank_of_step.started AS started,
            rows_of_rank.found AS found,
            arrayMin(arrayMap(row -> row.10, found)) AS lowest_stream,
            arrayMax(arrayMap(row -> row.10, found)) AS highest_stream,
            arrayFilter(row -> row.10 < highest_stream, if(highest_stream > 0, found, [])) AS below,
            arrayMap(row -> toInt64(row.4 - if(row.10 = lowest_stream, 0, arrayFold(
                (so_far, lower) -> if(lower.10 < row.10, (greatest(so_far.1, lower.1 + lower.4), so_far.2 + greatest(toInt64(0), least(lower.1 + lower.4, row.1 + row.4) - greatest(lower.1, row.1, so_far.1))), so_far),
                below, (toInt64(-9223372036854775807), toInt64(0))).2)), found) AS exposed,
            arrayDistinct(arrayMap(row -> (row.5, row.6), arrayFilter(row -> row.11 = 1, found))) AS flagged,
            arrayMap(row -> toUInt8(rank_of_step.ep_size > 1 AND (row.11 = 1 OR (row.6 IN (3, 5) AND NOT has(flagged, (row.5, row.6))))), found) AS is_exchange
        FROM rank_of_step
        LEFT JOIN rows_of_rank ON rows_of_rank.run_id = rank_of_step.run_id
            AND rows_of_rank.step = rank_of_step.step AND rows_of_rank.rank = rank_of_step.rank
    ),
    keyed AS
    (
        SELECT
            run_id, step, rank, ep_group, ep_size, started,
            arrayMap(row -> (row.5, row.6, row.7, row.8, row.9), arrayFilter((row, exchange) -> exchange = 1, found, is_exchange)) AS keys,
            sipHash128(keys) AS same_keys,
            arrayMap((before, exchange) -> toUInt32(before - exchange), arrayCumSum(is_exchange), is_exchange) AS barriers,
            arrayPushBack(
                arrayMap((row, ns, barrier, exchange, position) -> (barrier, exchange, row.6, toInt16(row.5), ns, position),
                    found, exposed, barriers, is_exchange, arrayEnumerate(found)),
                (toUInt32(length(keys)), 0, 255, -1, 0, 0)) AS rows
        FROM exposed_rows
    ),
    flat AS
    (
        SELECT run_id, step, rank, ep_group, same_keys, row.1 AS barrier, row.2 AS exchange, row.3 AS phase, row.4 AS layer,
               row.5 AS exposed_ns, row.6 AS position
        FROM keyed
        ARRAY JOIN rows AS row
    ),
    group_of_step AS
    (
        SELECT run_id, step, ep_group, count() AS num_ranks, max(keyed.ep_size) AS ep_size, any(keys) AS keys,
               any(same_keys) AS same_keys
        FROM keyed
        GROUP BY run_id, step, ep_group
        HAVING uniqExact(keyed.same_keys) = 1
    ),
    step_start AS
    (
        SELECT run_id, step, min(started) AS step_time
        FROM keyed
        GROUP BY run_id, step
    ),
    layers_of_work AS
    (
        SELECT run_id, step, same_keys, barrier, groupArray((phase, layer)) AS work_layers
        FROM
        (
            SELECT run_id, step, same_keys, barrier, phase, argMax(flat.layer, (rank, position)) AS layer
            FROM flat
            WHERE exchange = 0 AND phase != 255
            GROUP BY run_id, step, same_keys, barrier, phase
        )
        GROUP BY run_id, step, same_keys, barrier
    ),
    work_of_rank AS
    (
        SELECT run_id, step, ep_group, barrier, rank,
               sumIf(flat.exposed_ns, exchange = 0) AS work_ns,
               sumIf(flat.exposed_ns, exchange = 1) AS exchange_ns,
               sumMapIf(map(phase, flat.exposed_ns), exchange = 0 AND phase != 255) AS by_phase
        FROM flat
        GROUP BY run_id, step, ep_group, barrier, rank
    ),
    work_of_group AS
    (
        SELECT run_id, step, ep_group, barrier,
               arraySort(groupArray((rank, work_ns, exchange_ns, by_phase))) AS of_ranks,
               sumMap(work_of_rank.by_phase) AS work_by_phase
        FROM work_of_rank
        GROUP BY run_id, step, ep_group, barrier
    ),
    figures AS
    (
        SELECT
            work.run_id AS run_id,
            work.step AS step,
            work.ep_group AS ep_group,
            work.barrier AS barrier,
            groups.num_ranks AS num_ranks,
            groups.ep_size AS ep_size,
            groups.keys AS keys,
            groups.same_keys AS same_keys,
            barrier = length(keys) AS is_tail,
            if(is_tail, (-1, 0, 0, 0, 0), keys[barrier + 1]) AS key,
            arrayMap(of -> of.1, of_ranks) AS ranks,
            arrayMap(of -> of.2, of_ranks) AS works,
            arrayMap(of -> of.3, of_ranks) AS exchanges,
            arrayMax(works) AS max_work_ns,
            arraySum(works) AS work_sum_ns,
            intDiv(work_sum_ns, num_ranks) AS mean_work_ns,
            arrayMin(exchanges) AS transfer_ns,
            arrayMin(arrayMap((busy, inside) -> if(busy = max_work_ns, inside, 9223372036854775807), works, exchanges)) AS least_of_busiest,
            arrayFirstIndex((busy, inside) -> busy = max_work_ns AND inside = least_of_busiest, works, exchanges) AS critical,
            arrayFirstIndex(inside -> inside = transfer_ns, exchanges) AS least_waiting,
            of_ranks[critical].4 AS critical_work,
            if(num_ranks > 1, arrayMap(code -> critical_work[code] - (work_by_phase[code] - critical_work[code]) / (num_ranks - 1), range(11)), arrayWithConstant(11, 0.)) AS excess_by_phase,
            indexOf(excess_by_phase, arrayMax(excess_by_phase)) - 1 AS work_phase_code,
            if(num_ranks > 1, max_work_ns - (work_sum_ns - max_work_ns) / (num_ranks - 1), 0.) AS lead_ns,
            if(num_ranks > 1, (arraySum(exchanges) - exchanges[critical]) / (num_ranks - 1) - exchanges[critical], 0.) AS lead_by_wait_ns,
            if(is_tail, 0., least(greatest(lead_by_wait_ns / greatest(lead_ns, 1.), 0.), 1.)) AS confirmed,
            0.1 * transfer_ns + 0.02 * max_work_ns AS tolerance_ns,
            arrayMax(exchanges) - transfer_ns - (max_work_ns - arrayMin(works)) AS unexplained_ns,
            multiIf(is_tail, lead_ns > tolerance_ns, lead_ns > tolerance_ns, confirmed < 0.5, unexplained_ns > greatest(tolerance_ns, transfer_ns / 2)) AS doubtful,
            num_ranks > 1 AND notEmpty(keys) AS judged,
            num_ranks >= ep_size AS whole,
            of_ranks
        FROM work_of_group AS work
        INNER JOIN group_of_step AS groups ON groups.run_id = work.run_id AND groups.step = work.step AND groups.ep_group = work.ep_group
    )
SELECT
    figures.run_id AS run_id,
    figures.step AS step,
    step_start.step_time AS step_time,
    ep_group,
    figures.barrier AS barrier,
    toInt16(key.1) AS layer,
    transform(key.2, [0, 3, 5], ['outside', 'dispatch', 'combine'], 'other') AS phase,
    if(key.3 = 1, 'backward', 'forward') AS direction,
    toUInt16(key.4) AS microbatch,
    toUInt16(key.5) AS ordinal,
    num_ranks,
    ep_size,
    whole,
    judged,
    ranks[critical] AS critical_rank,
    ranks[least_waiting] AS least_waiting_rank,
    critical_work AS critical_work_ns,
    ['outside', 'router', 'permute', 'dispatch', 'expert_gemm', 'combine', 'unpermute', 'shared_expert', 'fused', 'schedule', 'accept'][work_phase_code + 1] AS work_phase,
    toInt16(multiIf(
        arrayExists(of -> of.1 = work_phase_code, layers.work_layers), arrayFirst(of -> of.1 = work_phase_code, layers.work_layers).2,
        is_tail, -1, key.1)) AS work_layer,
    transfer_ns,
    max_work_ns,
    mean_work_ns,
    if(num_ranks > 1, max_work_ns - mean_work_ns, 0) AS extension_ns,
    arraySum(exchanges) - num_ranks * transfer_ns AS wait_sum_ns,
    confirmed,
    toUInt8(doubtful) AS doubtful
FROM figures
INNER JOIN step_start ON step_start.run_id = figures.run_id AND step_start.step = figures.step
LEFT JOIN layers_of_work AS layers ON layers.run_id = figures.run_id AND layers.step = figures.step
    AND layers.same_keys = figures.same_keys AND layers.barrier = figures.barrier
COMMENT 'Every exchange of every expert-parallel group, judged from the rows of its ranks: the basis of v_step_barriers and v_step_verdicts. Groups whose ranks do not share one sequence of exchanges are left out'
