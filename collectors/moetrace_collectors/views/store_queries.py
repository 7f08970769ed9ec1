"""The SQL of the views: every table and column name that they read is spelled here.

Tables are ReplacingMergeTree (delivery is at least once), so every read says FINAL; collector_events
is a plain log. `{first_step}` bounds a read to the steps that the views show, and warm-up steps are
left out of every figure that sums or averages. An aggregate never takes the name of its column: within
one SELECT the engine would read the alias.
"""

from __future__ import annotations

_TABLE = "{{database:Identifier}}.{name} FINAL WHERE run_id = {{run:String}}"


def _read(name: str) -> str:
    return _TABLE.format(name=name)


_WARMUP_STEPS = f"SELECT step FROM {_read('step_verdicts')} AND warmup = 1"
_COUNTED = f"step >= {{first_step:UInt64}} AND step NOT IN ({_WARMUP_STEPS})"
# A rank that is missing from a step would look lightly loaded. Unless every step misses one:
# then there is nothing better to show.
_COMPARABLE = (
    f"{_COUNTED} AND (NOT {{whole_only:UInt8}} OR step NOT IN "
    f"(SELECT step FROM {_read('step_verdicts')} AND notEmpty(missing_ranks)))"
)

RUNS = """
SELECT run_id, toUnixTimestamp64Nano(max(start_time)) AS last_ns
FROM {database:Identifier}.rank_steps FINAL
GROUP BY run_id
ORDER BY last_ns DESC, run_id
"""

OVERVIEW = f"""
SELECT
    anyLast(model_name) AS model_name,
    anyLast(model_version) AS model_version,
    max(world_size) AS world_size,
    arraySort(groupUniqArray(rank)) AS ranks,
    arraySort(groupUniqArray(toString(host_name))) AS hosts,
    arraySort(groupUniqArray(toString(forward_mode))) AS forward_modes,
    arraySort(groupUniqArray(toString(cohort))) AS cohorts,
    arraySort(groupUniqArray(toString(clock))) AS clocks,
    max(sample_period) AS sample_period,
    toUnixTimestamp64Nano(min(start_time)) AS first_ns,
    max(toUnixTimestamp64Nano(start_time) + duration_ns) AS last_ns,
    count() AS rank_steps,
    countIf(late = 1) AS late
FROM {_read("rank_steps")}
"""

STEP_COUNTS = f"""
SELECT count() AS steps, countIf(warmup = 1) AS warmup_steps, toString(closed_by) AS closed_by
FROM {_read("step_verdicts")}
GROUP BY closed_by
"""

VERDICT_COLUMNS = """
    step, toUnixTimestamp64Nano(step_time) AS start_ns, toString(forward_mode) AS forward_mode,
    toString(evidence) AS evidence, reason, rank, layer, toString(phase) AS phase,
    toString(cause) AS cause, worth_ns, share,
    runner_up_rank, runner_up_layer, toString(runner_up_phase) AS runner_up_phase, runner_up_worth_ns,
    step_ns, extension_ns, CAST(phase_ns, 'Map(String, Int64)') AS phase_ns,
    world_size, missing_ranks, toString(closed_by) AS closed_by, warmup
"""

STEPS = f"""
SELECT {VERDICT_COLUMNS}
FROM {_read("step_verdicts")}
ORDER BY step DESC
LIMIT {{limit:UInt64}}
"""

MISSING = f"""
SELECT arrayJoin(missing_ranks) AS rank, count() AS steps
FROM {_read("step_verdicts")}
GROUP BY rank ORDER BY rank
"""

EXPERT_LOADS = f"""
SELECT
    toString(forward_mode) AS forward_mode, toString(cohort) AS cohort,
    layer, expert AS column, sum(count) AS total
FROM {_read("expert_loads")} AND count_kind = 'routed' AND {_COUNTED}
GROUP BY forward_mode, cohort, layer, column
"""

RANK_LOADS = f"""
SELECT
    toString(forward_mode) AS forward_mode, toString(cohort) AS cohort,
    layer, rank AS column, sum(count) AS total
FROM {_read("expert_loads")} AND count_kind = 'received' AND {_COMPARABLE}
GROUP BY forward_mode, cohort, layer, column
"""

STEP_RATIOS = f"""
SELECT toString(forward_mode) AS forward_mode, layer, quantileExact(0.95)(ratio) AS ratio
FROM
(
    SELECT step, forward_mode, layer, max(total) * count() / sum(total) AS ratio
    FROM
    (
        SELECT step, forward_mode, layer, expert, sum(count) AS total
        FROM {_read("expert_loads")} AND count_kind = 'routed' AND {_COUNTED}
        GROUP BY step, forward_mode, layer, expert
    )
    GROUP BY step, forward_mode, layer
    HAVING sum(total) > 0
)
GROUP BY forward_mode, layer
"""

PAIRS_BY_KIND = f"""
SELECT toString(count_kind) AS count_kind, sum(count) AS total
FROM {_read("expert_loads")} AND {_COUNTED}
GROUP BY count_kind ORDER BY count_kind
"""

RANK_PLACES = f"""
SELECT rank, anyLast(ep_group) AS ep_group, anyLast(ep_rank) AS ep_rank
FROM {_read("rank_steps")}
GROUP BY rank ORDER BY rank
"""

TRAFFIC = f"""
SELECT source_rank, destination_ep_rank, sum(rows) AS total_rows, sum(bytes) AS total_bytes
FROM {_read("rank_traffic")} AND phase = 'dispatch' AND {_COMPARABLE}
GROUP BY source_rank, destination_ep_rank
"""

EXTENSIONS = f"""
SELECT
    releaser_rank AS rank, toString(work_phase) AS phase,
    sumIf(extension_ns, ambiguous = 0) AS agreed_ns, sumIf(extension_ns, ambiguous = 1) AS ambiguous_ns
FROM {_read("step_barriers")} AND releaser_rank >= 0 AND {_COMPARABLE}
GROUP BY rank, phase ORDER BY rank, phase
"""

BARRIERS = f"""
SELECT
    ep_group, barrier, layer, toString(phase) AS phase, toString(direction) AS direction,
    microbatch, ordinal, releaser_rank, toString(work_phase) AS work_phase,
    transfer_ns, extension_ns, ambiguous
FROM {_read("step_barriers")} AND step = {{step:UInt64}}
ORDER BY ep_group, barrier
"""

STEP_RANKS = f"""
SELECT DISTINCT rank
FROM {_read("rank_steps")} AND step = {{step:UInt64}} AND late = 0
ORDER BY rank
"""

INTERVALS = f"""
SELECT
    rank, ep_group, layer, toString(phase) AS phase, toString(direction) AS direction,
    microbatch, ordinal, is_barrier, stream, flags,
    toUnixTimestamp64Nano(start_time) AS start_ns, duration_ns, bytes, rows
FROM {_read("phase_spans")} AND step = {{step:UInt64}} AND rank IN {{ranks:Array(UInt32)}}
ORDER BY rank, start_ns, duration_ns
"""

EVENTS = """
SELECT run_id = '' AS unattributed, toString(kind) AS kind, toString(reason) AS reason, count() AS events
FROM {database:Identifier}.collector_events
WHERE run_id IN ({run:String}, '')
GROUP BY unattributed, kind, reason ORDER BY kind, reason
"""

DAMAGED = """
SELECT table AS damaged, count() AS parts
FROM system.detached_parts
WHERE database = {database:String} AND startsWith(reason, 'broken')
GROUP BY damaged ORDER BY damaged
"""

NEWEST_RUN = """
SELECT run_id FROM {database:Identifier}.step_verdicts
GROUP BY run_id ORDER BY max(step_time) DESC, run_id LIMIT 1
"""
"""Over judged steps, which are far fewer than rank steps: it is asked again and again."""

NEWEST_STEPS = """
SELECT DISTINCT step FROM {database:Identifier}.step_verdicts
WHERE run_id = {run:String}
ORDER BY step DESC LIMIT {limit:UInt64}
"""

RECENT_STEPS = STEPS.replace("\nORDER BY", " AND step >= {first_step:UInt64}\nORDER BY")
"""STEPS without reading all of a long run."""
