CREATE OR REPLACE VIEW {database}.v_layer_loads {on_cluster} AS
WITH
    loads AS
    (
        SELECT source.run_id AS run_id, source.step AS step, source.layer AS layer, source.forward_mode AS forward_mode,
               source.rank AS rank, source.expert AS expert, source.count_kind AS count_kind, source.count AS count,
               source.step_time AS step_time
        FROM (SELECT * FROM {local:expert_loads} FINAL WHERE count_kind IN ('routed', 'received')) AS source
        INNER JOIN (SELECT run_id, step, rank, microbatch FROM {local:rank_steps} FINAL WHERE late = 0) AS records
            ON records.run_id = source.run_id AND records.step = source.step
            AND records.rank = source.rank AND records.microbatch = source.microbatch
    ),
    experts AS
    (
        SELECT run_id, step, layer, forward_mode, min(started) AS step_time,
               arrayMap(of -> of.2, arraySort(groupArray((expert, pairs)))) AS counts
        FROM
        (
            SELECT run_id, step, layer, forward_mode, expert, sum(loads.count) AS pairs, min(loads.step_time) AS started
            FROM loads
            WHERE count_kind = 'routed'
            GROUP BY run_id, step, layer, forward_mode, expert
        )
        GROUP BY run_id, step, layer, forward_mode
    ),
    ranks AS
    (
        SELECT run_id, step, layer, forward_mode, groupArray(received) AS by_rank
        FROM
        (
            SELECT run_id, step, layer, forward_mode, rank, sum(loads.count) AS received
            FROM loads
            WHERE count_kind = 'received'
            GROUP BY run_id, step, layer, forward_mode, rank
        )
        GROUP BY run_id, step, layer, forward_mode
    )
SELECT
    experts.run_id AS run_id,
    experts.step AS step,
    experts.step_time AS step_time,
    experts.layer AS layer,
    experts.forward_mode AS forward_mode,
    arraySum(counts) AS tokens,
    tokens / length(counts) AS mean,
    if(tokens > 0, arrayMax(counts) / mean, 0.) AS max_mean_ratio,
    if(tokens > 0, sqrt(arrayAvg(arrayMap(pairs -> pow(pairs - mean, 2), counts))) / mean, 0.) AS cv,
    if(arraySum(by_rank) > 0, arrayMax(by_rank) * length(by_rank) / arraySum(by_rank), 0.) AS rank_max_mean_ratio,
    toInt64(indexOf(counts, arrayMax(counts))) - 1 AS hot_expert,
    countEqual(counts, 0) AS dead_experts
FROM experts
LEFT JOIN ranks ON ranks.run_id = experts.run_id AND ranks.step = experts.step
    AND ranks.layer = experts.layer AND ranks.forward_mode = experts.forward_mode
COMMENT 'Imbalance of every layer by step and forward mode, as the collector exports it'
