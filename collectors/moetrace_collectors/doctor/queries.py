"""The SQL of the checklist: complete statements that a person can run with `moetrace query`. Pure.

Run ids have no quotes (RUN_ID_PATTERN) and databases are plain names, so both stand in the text as they are.
"""

from __future__ import annotations

_COUNTED = "step NOT IN (SELECT step FROM {db}.step_verdicts FINAL WHERE run_id = '{run}' AND warmup = 1)"
"""Steps that figures are of, as in every other view."""

COUNTED = """
SELECT
    minIf(step, warmup = 0) AS first, maxIf(step, warmup = 0) AS last, countIf(warmup = 0) AS counted,
    countIf(warmup = 1) AS warm
FROM {db}.step_verdicts FINAL WHERE run_id = '{run}'
"""

COVERAGE = """
SELECT
    (SELECT max(world_size) FROM {db}.rank_steps FINAL WHERE run_id = '{run}') AS world_size,
    (SELECT uniqExact(rank) FROM {db}.rank_steps FINAL WHERE run_id = '{run}') AS ranks,
    (SELECT max(ep_size) FROM {db}.rank_steps FINAL WHERE run_id = '{run}') AS ep_size,
    (SELECT uniqExact(layer) FROM {db}.expert_loads FINAL WHERE run_id = '{run}') AS counted_layers,
    uniqExactIf(layer, layer >= 0) AS layers,
    uniqExactIf(layer, layer >= 0 AND phase = 'router') AS layers_with_router,
    uniqExactIf(layer, layer >= 0 AND phase = 'expert_gemm') AS layers_with_experts,
    uniqExactIf(layer, layer >= 0 AND is_barrier = 1) AS layers_with_exchange,
    sumIf(duration_ns, phase = 'fused') AS fused_ns,
    sumIf(duration_ns, layer >= 0) AS layer_ns
FROM {db}.phase_spans FINAL WHERE run_id = '{run}'
"""

MODEL_SHAPE = """
SELECT
    max(e.expert) + 1 AS experts,
    (
        SELECT arrayFold(
            (divisor, total) -> gcd(divisor, total), groupArray(toInt64(pairs)), any(toInt64(pairs))
        )
        FROM
        (
            SELECT sum(count) AS pairs FROM {db}.expert_loads FINAL
            WHERE run_id = '{run}' AND count_kind IN ('routed', 'padding', 'recompute')
            GROUP BY step, layer, rank, microbatch, count_kind HAVING pairs > 0
        )
    ) AS pairs_are_multiples_of,
    (
        SELECT uniqExact(layer) FROM {db}.phase_spans FINAL
        WHERE run_id = '{run}' AND phase = 'shared_expert'
    ) AS layers_with_shared_expert
FROM {db}.expert_loads AS e FINAL WHERE e.run_id = '{run}' AND e.count_kind = 'routed'
"""

DROPS = """
SELECT
    sumIf(count, count_kind = 'routed') AS routed,
    sumIf(count, count_kind = 'dropped') AS dropped,
    sumIf(count, count_kind = 'invalid') AS invalid,
    (
        SELECT sum(lost) FROM
        (
            SELECT max(step) - min(step) + 1 - uniqExact(step) AS lost
            FROM {db}.rank_steps FINAL WHERE run_id = '{run}'
            GROUP BY rank HAVING max(sample_period) = 1
        )
    ) AS lost_rank_steps
FROM {db}.expert_loads FINAL WHERE run_id = '{run}' AND {counted}
"""

TOPOLOGY = """
SELECT
    count() AS ranks, countIf(host = '') AS ranks_without_host, uniqExactIf(host, host != '') AS hosts,
    uniqExact(ep_group) AS ep_groups, min(ep_size) AS smallest_ep_size, max(ep_size) AS largest_ep_size,
    max(world_size) AS world_size
FROM
(
    SELECT rank, anyLast(toString(host_name)) AS host, anyLast(ep_group) AS ep_group,
        anyLast(ep_size) AS ep_size, max(world_size) AS world_size
    FROM {db}.rank_steps FINAL WHERE run_id = '{run}' GROUP BY rank
)
"""

ALL_TO_ALL = """
SELECT
    toString(phase) AS phase, count() AS exchanges,
    quantileExact(0.5)(transfer_ns) / 1e6 AS p50_ms, quantileExact(0.95)(transfer_ns) / 1e6 AS p95_ms,
    quantileExact(0.99)(transfer_ns) / 1e6 AS p99_ms,
    (SELECT max(ep_size) FROM {db}.rank_steps FINAL WHERE run_id = '{run}') AS ep_size
FROM {db}.step_barriers FINAL
WHERE run_id = '{run}' AND {counted} AND phase IN ('dispatch', 'combine') AND layer >= 0
GROUP BY phase ORDER BY phase DESC
"""

CROSS_NODE = """
SELECT
    sum(t.rows) AS total_rows, sumIf(t.rows, s.host != d.host) AS cross_rows, uniqExact(s.host) AS hosts
FROM {db}.rank_traffic AS t FINAL
INNER JOIN
(
    SELECT rank, anyLast(ep_group) AS ep_group, anyLast(toString(host_name)) AS host
    FROM {db}.rank_steps FINAL WHERE run_id = '{run}' GROUP BY rank
) AS s ON s.rank = t.source_rank
INNER JOIN
(
    SELECT ep_group, ep_rank, anyLast(toString(host_name)) AS host
    FROM {db}.rank_steps FINAL WHERE run_id = '{run}' GROUP BY ep_group, ep_rank
) AS d ON d.ep_group = s.ep_group AND d.ep_rank = t.destination_ep_rank
WHERE t.run_id = '{run}' AND t.{counted} AND s.host != '' AND d.host != ''
"""

HOT_EXPERTS = """
SELECT
    layer, rank, count() AS hot_experts, arraySort(groupArray(expert)) AS experts,
    any(rank_load) * any(num_ranks) / any(layer_load) AS rank_load_over_mean
FROM
(
    SELECT layer, expert, rank, sum(count) AS load,
        sum(load) OVER (PARTITION BY layer, rank) AS rank_load,
        sum(load) OVER (PARTITION BY layer) AS layer_load,
        (
            SELECT max(expert) + 1 FROM {db}.expert_loads FINAL
            WHERE run_id = '{run}' AND count_kind = 'routed'
        ) AS num_experts,
        (SELECT uniqExact(rank) FROM {db}.rank_steps FINAL WHERE run_id = '{run}') AS num_ranks
    FROM {db}.expert_loads FINAL WHERE run_id = '{run}' AND {counted} AND count_kind = 'received'
    GROUP BY layer, expert, rank
)
WHERE load > 2 * layer_load / num_experts
GROUP BY layer, rank ORDER BY rank_load_over_mean DESC LIMIT 50
"""

RECEIVED = """
SELECT sum(count) AS received FROM {db}.expert_loads FINAL
WHERE run_id = '{run}' AND {counted} AND count_kind = 'received'
"""

OVERLAP = """
SELECT
    sumIf(duration_ns, is_barrier = 1) AS exchange_ns,
    sumIf(duration_ns, is_barrier = 1 AND stream > 0) AS asynchronous_ns,
    sumIf(duration_ns, stream = 0) AS rank_ns,
    uniqExactIf(layer, phase = 'shared_expert') AS layers_with_shared_expert,
    (SELECT uniqExact(microbatch) FROM {db}.phase_spans FINAL WHERE run_id = '{run}') AS microbatches
FROM {db}.phase_spans FINAL WHERE run_id = '{run}' AND {counted}
"""

FORWARD_MODES = """
SELECT
    uniqExact(step) AS steps,
    uniqExactIf(step, forward_mode = 'mixed') AS mixed,
    uniqExactIf(step, forward_mode = 'prefill') AS prefill,
    uniqExactIf(step, forward_mode = 'decode') AS decode,
    uniqExactIf(step, forward_mode = 'train') AS train
FROM {db}.rank_steps FINAL WHERE run_id = '{run}'
"""

ROLLBACK = """
SELECT
    (SELECT max(placement_version) FROM {db}.rank_steps FINAL WHERE run_id = '{run}') AS newest_version,
    (
        SELECT argMax(version, sequence) FROM {db}.placement_ledger
        WHERE run_id = '{run}' AND event IN ('announced', 'applied')
    ) AS version,
    (
        SELECT argMax(rollback_version, sequence) FROM {db}.placement_ledger
        WHERE run_id = '{run}' AND event IN ('announced', 'applied')
    ) AS rollback_version,
    (
        SELECT groupUniqArray(version) FROM {db}.placement_ledger
        WHERE run_id = '{run}' AND event = 'announced'
    ) AS versions_with_mapping
"""

ALERT_RULES = "{prometheus}/api/v1/rules?type=alert"


def render(template: str, *, database: str, run_id: str) -> str:
    """The statement as it is run and printed."""
    counted = template.replace("{counted}", _COUNTED)
    return counted.replace("{db}", database).replace("{run}", run_id).strip()
