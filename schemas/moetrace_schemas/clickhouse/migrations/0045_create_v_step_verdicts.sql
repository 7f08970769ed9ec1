CREATE OR REPLACE VIEW {database}.v_step_verdicts {on_cluster} AS
WITH
    rank_of_step AS
    (
        SELECT run_id, step, rank, count() AS num_records, min(start_time) AS started, max(records.world_size) AS world_size,
               groupUniqArray(toString(records.forward_mode)) AS forward_modes, max(records.warmup) AS warmup,
               groupUniqArray(microbatch) AS microbatches, min(ep_group) AS ep_group
        FROM (SELECT * FROM {local:rank_steps} FINAL WHERE late = 0) AS records
        GROUP BY run_id, step, rank
    ),
    steps AS
    (
        SELECT run_id, step, min(started) AS step_time, max(rank_of_step.world_size) AS world_size,
               groupUniqArrayArray(rank_of_step.forward_modes) AS forward_modes, max(rank_of_step.warmup) AS warmup,
               length(groupUniqArrayArray(arrayPushBack(microbatches, 0))) AS num_microbatches,
               groupArray((rank, num_records)) AS arrived,
               uniqExact(ep_group) AS num_groups
        FROM rank_of_step
        GROUP BY run_id, step
    ),
    groups AS
    (
        SELECT run_id, step, ep_group,
               sum(max_work_ns + transfer_ns) AS frontier_ns,
               sum(extension_ns) AS group_extension_ns,
               sumMap(critical_work_ns) AS work_by_phase,
               sumMap(map(toUInt8(transform(phase, ['outside', 'dispatch', 'combine'], [0, 3, 5], 255)), transfer_ns)) AS transfer_by_phase,
               max(judged AND NOT whole) AS undecided,
               groupArrayIf((critical_rank, indexOf(['outside', 'router', 'permute', 'dispatch', 'expert_gemm', 'combine', 'unpermute', 'shared_expert', 'fused', 'schedule', 'accept'], work_phase), work_layer, extension_ns), judged) AS blamed
        FROM {local:v_step_exchanges}
        GROUP BY run_id, step, ep_group
    ),
    cells_of_group AS
    (
        SELECT *,
               arrayMap(cell -> (arraySum(arrayMap(one -> if(one.1 = cell.1 AND one.2 = cell.2, one.4, 0), blamed)), -toInt64(cell.1), -toInt64(cell.2)),
                   arrayDistinct(arrayMap(one -> (one.1, one.2), blamed))) AS cells
        FROM groups
    ),
    cell_of_group AS
    (
        SELECT *, if(notEmpty(cells), arrayReverseSort(cells)[1], (0, 1, 1)) AS cell
        FROM cells_of_group
    ),
    blamed_on_cell AS
    (
        SELECT *, arrayFilter(one -> one.1 = -cell.2 AND one.2 = -cell.3, blamed) AS of_cell
        FROM cell_of_group
    ),
    largest AS
    (
        SELECT *,
               arrayReverseSort(arrayMap(layer -> (arraySum(arrayMap(one -> if(one.3 = layer, one.4, 0), of_cell)), -toInt32(layer)),
                   arrayDistinct(arrayMap(one -> one.3, of_cell)))) AS by_layer
        FROM blamed_on_cell
    ),
    slowest AS
    (
        SELECT run_id, step, count() AS num_matched_groups, max(undecided) AS any_undecided,
               argMax((frontier_ns, group_extension_ns, work_by_phase, transfer_by_phase), (frontier_ns, -toInt64(ep_group))) AS figures,
               argMax((cell, if(notEmpty(by_layer), by_layer[1], (0, 1)), group_extension_ns), cell) AS worst
        FROM largest
        GROUP BY run_id, step
    )
SELECT
    steps.run_id AS run_id,
    steps.step AS step,
    steps.step_time AS step_time,
    if(length(forward_modes) = 1, forward_modes[1], 'mixed') AS forward_mode,
    num_matched_groups > 0 AND NOT any_undecided AND worst.1.1 > 0 AS is_known,
    if(is_known, toNullable(toUInt32(-worst.1.2)), NULL) AS largest_rank,
    if(is_known, toNullable(['outside', 'router', 'permute', 'dispatch', 'expert_gemm', 'combine', 'unpermute', 'shared_expert', 'fused', 'schedule', 'accept'][-worst.1.3]), NULL) AS largest_phase,
    if(is_known AND worst.2.2 != 1 AND 2 * worst.2.1 >= worst.1.1, toNullable(toInt16(-worst.2.2)), NULL) AS largest_layer,
    if(is_known, toNullable(worst.1.1), NULL) AS largest_worth_ns,
    if(is_known, toNullable(worst.1.1 / worst.3), NULL) AS largest_share,
    if(num_groups = num_matched_groups, toNullable(figures.1), NULL) AS step_ns,
    if(num_groups = num_matched_groups, toNullable(figures.2), NULL) AS extension_ns,
    if(num_groups = num_matched_groups,
        mapApply((code, ns) -> (['outside', 'router', 'permute', 'dispatch', 'expert_gemm', 'combine', 'unpermute', 'shared_expert', 'fused', 'schedule', 'accept'][code + 1], ns),
            mapFilter((code, ns) -> ns != 0, mapAdd(figures.3, figures.4))),
        map()) AS phase_ns,
    steps.world_size AS world_size,
    arrayFilter(number -> NOT has(arrayMap(of -> of.1, arrayFilter(of -> of.2 = num_microbatches, arrived)), number), range(steps.world_size)) AS missing_ranks,
    warmup,
    num_groups,
    num_matched_groups
FROM steps
LEFT JOIN slowest ON slowest.run_id = steps.run_id AND slowest.step = steps.step
COMMENT 'What a step says by itself: frontier, phases and the largest extension. Evidence, cause and the named rank need the history of calm steps and are in step_verdicts only'
