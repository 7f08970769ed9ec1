CREATE OR REPLACE VIEW {database}.v_expert_heatmap {on_cluster} AS
WITH
    counts AS
    (
        SELECT loads.run_id AS run_id, loads.step AS step, loads.layer AS layer, loads.forward_mode AS forward_mode,
               loads.expert AS expert,
               min(loads.step_time) AS step_time,
               sumIf(loads.count, count_kind = 'routed') AS routed,
               countIf(count_kind = 'routed') > 0 AS is_routed,
               sumIf(loads.count, count_kind = 'received') AS received,
               sumIf(loads.count, count_kind = 'dropped') AS dropped
        FROM (SELECT * FROM {local:expert_loads} FINAL WHERE count_kind IN ('routed', 'received', 'dropped')) AS loads
        INNER JOIN (SELECT run_id, step, rank, microbatch FROM {local:rank_steps} FINAL WHERE late = 0) AS records
            ON records.run_id = loads.run_id AND records.step = loads.step
            AND records.rank = loads.rank AND records.microbatch = loads.microbatch
        GROUP BY run_id, step, layer, forward_mode, expert
    ),
    layers AS
    (
        SELECT run_id, step, layer, forward_mode, sum(routed) AS tokens, countIf(is_routed) AS num_experts
        FROM counts
        GROUP BY run_id, step, layer, forward_mode
    )
SELECT
    counts.run_id AS run_id,
    counts.step AS step,
    counts.step_time AS step_time,
    counts.layer AS layer,
    counts.forward_mode AS forward_mode,
    counts.expert AS expert,
    counts.routed AS routed,
    counts.received AS received,
    counts.dropped AS dropped,
    if(tokens > 0, counts.routed / (tokens / num_experts), 0.) AS load_over_mean
FROM counts
INNER JOIN layers ON layers.run_id = counts.run_id AND layers.step = counts.step
    AND layers.layer = counts.layer AND layers.forward_mode = counts.forward_mode
COMMENT 'Load of every expert by step, layer and forward mode, summed over ranks that came in time'
