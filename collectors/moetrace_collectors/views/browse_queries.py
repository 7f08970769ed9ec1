"""The SQL of browsing: runs, pages of steps, one step over all ranks, loads and traffic of chosen steps.

Every read is bounded, so that a store of months and a run of hundreds of ranks answer at once: runs and pages
come from the table of verdicts (one row a step), everything per rank from steps that are named one by one.
As in `store_queries`, an aggregate never takes the name of its column.
"""

from __future__ import annotations

from moetrace_collectors.views.store_queries import VERDICT_COLUMNS

_VERDICTS = "{database:Identifier}.step_verdicts FINAL WHERE run_id = {run:String}"
_CHOSEN = "run_id = {run:String} AND step IN {steps:Array(UInt64)}"

RUN_LIST = """
SELECT
    run_id, count() AS num_steps, max(step) AS last_step, countIf(warmup = 1) AS num_warmup,
    toUnixTimestamp64Nano(min(step_time)) AS first_ns, toUnixTimestamp64Nano(max(step_time)) AS last_ns,
    max(world_size) AS ranks, arraySort(groupUniqArray(toString(forward_mode))) AS modes,
    countIf(warmup = 0 AND evidence = 'clear') AS num_clear,
    countIf(warmup = 0 AND evidence = 'ambiguous') AS num_ambiguous,
    quantileExactIf(0.5)(step_ns, warmup = 0 AND step_ns > 0) AS median_ns,
    quantileExactIf(0.95)(step_ns, warmup = 0 AND step_ns > 0) AS p95_ns
FROM {database:Identifier}.step_verdicts FINAL
WHERE {run:String} = '' OR run_id = {run:String}
GROUP BY run_id
ORDER BY last_ns DESC, run_id
LIMIT {limit:UInt64}
"""

RUN_MODELS = """
SELECT run_id, any(model_name) AS name, any(model_version) AS version, uniqExact(host_name) AS hosts,
    max(sample_period) AS period
FROM {database:Identifier}.rank_steps
WHERE ({run:String} = '' OR run_id = {run:String}) AND (run_id, step) IN (
    SELECT run_id, max(step) FROM {database:Identifier}.step_verdicts
    WHERE {run:String} = '' OR run_id = {run:String}
    GROUP BY run_id
)
GROUP BY run_id
"""

NEWS = """
SELECT max(step) AS last_step, uniqExactIf(step, step > {since:Int64}) AS num_new, count() AS num_rows
FROM {database:Identifier}.step_verdicts
WHERE run_id = {run:String}
"""
"""Rows and not steps, which would cost FINAL: that there are more is enough, and repeats only look again."""

_FILTER = """
    AND ({evidence:String} = '' OR evidence = {evidence:String})
    AND ({cause:String} = '' OR cause = {cause:String})
    AND ({phase:String} = '' OR ifNull(toString(phase), '') = {phase:String})
    AND ({mode:String} = '' OR forward_mode = {mode:String})
    AND ({rank:Int64} < 0 OR ifNull(toInt64(rank), -1) = {rank:Int64})
    AND step_ns >= {slower_ns:Int64}
    AND arrayAll(
        word -> positionCaseInsensitiveUTF8(
            concat(
                toString(step), ' ', toString(forward_mode), ' ', toString(evidence), ' ',
                toString(cause), ' ',
                ifNull(toString(phase), ''), ' rank ', ifNull(toString(rank), 'none'), ' layer ',
                ifNull(toString(layer), 'none'), ' ', toString(closed_by), ' ', reason
            ),
            word
        ) > 0,
        splitByWhitespace({text:String})
    )
"""

_UPTO = "AND ({upto:Int64} < 0 OR step <= {upto:Int64})"

STEP_COUNT = f"""
SELECT count() AS num_steps, max(step) AS last_step
FROM {_VERDICTS} {_UPTO} {_FILTER}
"""

STEP_ORDERS = {
    "newest": "step DESC",
    "oldest": "step",
    "worth": "worth_ns DESC, step DESC",
    "length": "step_ns DESC, step DESC",
}
"""By the name that a page asks with."""

STEP_PAGES = {
    name: f"""
SELECT {VERDICT_COLUMNS}
FROM {_VERDICTS} {_UPTO} {_FILTER}
ORDER BY {order}
LIMIT {{limit:UInt64}} OFFSET {{offset:UInt64}}
"""
    for name, order in STEP_ORDERS.items()
}

STEP_FACETS = f"""
SELECT
    max(step) AS newest, arraySort(groupUniqArray(toString(evidence))) AS evidences,
    arraySort(groupUniqArray(toString(cause))) AS causes,
    arraySort(groupUniqArray(ifNull(toString(phase), ''))) AS phases,
    arraySort(groupUniqArray(toString(forward_mode))) AS modes
FROM {_VERDICTS}
"""

ONE_STEP = f"""
SELECT {VERDICT_COLUMNS}
FROM {_VERDICTS} AND step = {{step:UInt64}}
"""

NEIGHBOURS = f"""
SELECT
    maxIf(step, step < {{step:UInt64}}) AS before, countIf(step < {{step:UInt64}}) AS num_before,
    minIf(step, step > {{step:UInt64}}) AS behind, countIf(step > {{step:UInt64}}) AS num_behind
FROM {_VERDICTS}
"""

RANK_BUDGETS = """
SELECT
    rank, any(ep_group) AS in_group,
    sumIf(duration_ns, is_barrier = 1) AS exchange_ns,
    sumIf(duration_ns, is_barrier = 0 AND stream = 0) AS work_ns
FROM {database:Identifier}.phase_spans FINAL
WHERE run_id = {run:String} AND step = {step:UInt64}
GROUP BY rank ORDER BY rank
"""

_EXTENDED = """
FROM {database:Identifier}.step_barriers FINAL
WHERE run_id = {run:String} AND step >= {first_step:UInt64} AND releaser_rank >= 0 AND ambiguous = 0
    AND step NOT IN (
        SELECT step FROM {database:Identifier}.step_verdicts FINAL WHERE run_id = {run:String} AND warmup = 1
    )
"""

LAYER_EXTENSIONS = f"""
SELECT layer, toString(work_phase) AS phase, sum(extension_ns) AS total_ns
{_EXTENDED}
GROUP BY layer, phase ORDER BY layer, phase
"""

RANK_LAYERS = f"""
SELECT rank, argMax(layer, layer_ns) AS most, max(layer_ns) AS most_ns, sum(layer_ns) AS total_ns
FROM (SELECT releaser_rank AS rank, layer, sum(extension_ns) AS layer_ns {_EXTENDED} GROUP BY rank, layer)
GROUP BY rank
"""

NEWEST_COUNTED = f"""
SELECT step
FROM {_VERDICTS} AND forward_mode = {{mode:String}} AND warmup = 0
ORDER BY step DESC
LIMIT {{limit:UInt64}}
"""

NEWEST_MODES = f"""
SELECT toString(forward_mode) AS forward_mode, max(step) AS last_step
FROM {_VERDICTS} AND warmup = 0
GROUP BY forward_mode ORDER BY forward_mode
"""

COHORTS = """
SELECT arraySort(groupUniqArrayArray(cohorts)) AS cohorts
FROM {database:Identifier}.runs WHERE run_id = {run:String}
"""

COHORT_STEPS = f"""
SELECT DISTINCT step FROM {{database:Identifier}}.rank_steps
WHERE {_CHOSEN} AND cohort = {{cohort:String}}
"""

LOAD_ROWS = f"""
SELECT count() AS num_rows FROM {{database:Identifier}}.expert_loads WHERE {_CHOSEN}
"""

TRAFFIC_ROWS = f"""
SELECT count() AS num_rows FROM {{database:Identifier}}.rank_traffic WHERE {_CHOSEN}
"""

LOADS = {
    column: f"""
SELECT layer, {column} AS place, sum(count) AS total
FROM {{database:Identifier}}.expert_loads FINAL
WHERE {_CHOSEN} AND count_kind = '{kind}' AND forward_mode = {{mode:String}}
    AND ({{cohort:String}} = '' OR cohort = {{cohort:String}})
GROUP BY layer, place
"""
    for column, kind in (("expert", "routed"), ("rank", "received"))
}

TRAFFIC_BLOCKS = f"""
SELECT
    intDiv(sent.source_rank, {{block:UInt32}}) AS source,
    intDiv(receiver.rank, {{block:UInt32}}) AS destination,
    sum(sent.num_rows) AS total_rows, sum(sent.num_bytes) AS total_bytes
FROM
(
    SELECT source_rank, destination_ep_rank, sum(rows) AS num_rows, sum(bytes) AS num_bytes
    FROM {{database:Identifier}}.rank_traffic FINAL
    WHERE {_CHOSEN} AND phase = 'dispatch'
        AND source_rank BETWEEN {{from_first:UInt32}} AND {{from_last:UInt32}}
    GROUP BY source_rank, destination_ep_rank
) AS sent
INNER JOIN
(
    SELECT rank, any(ep_group) AS in_group
    FROM {{database:Identifier}}.rank_steps WHERE {_CHOSEN} GROUP BY rank
) AS sender ON sender.rank = sent.source_rank
INNER JOIN
(
    SELECT rank, any(ep_group) AS in_group, any(ep_rank) AS place
    FROM {{database:Identifier}}.rank_steps WHERE {_CHOSEN} GROUP BY rank
) AS receiver ON receiver.in_group = sender.in_group AND receiver.place = sent.destination_ep_rank
WHERE receiver.rank BETWEEN {{to_first:UInt32}} AND {{to_last:UInt32}}
GROUP BY source, destination
"""

TRAFFIC_RANKS = f"""
SELECT max(rank) AS last_rank, count() AS num_rank_steps
FROM {{database:Identifier}}.rank_steps WHERE {_CHOSEN}
"""
