"""The SQL of exports: whole steps, row by row. Names of tables and columns are spelled here only.

As in views/store_queries.py: every read says FINAL, and an aggregate never takes the name of its column.
"""

from __future__ import annotations

_AT = "WHERE run_id = {run:String} AND step = {step:UInt64}"
_TABLE = "FROM {{database:Identifier}}.{name} FINAL"


def _from(name: str) -> str:
    return _TABLE.format(name=name)


def _read(name: str) -> str:
    return f"{_from(name)} {_AT}"


SLOW_STEPS = f"""
SELECT step {_from("step_verdicts")}
WHERE run_id = {{run:String}} AND warmup = 0
ORDER BY evidence = 'clear' DESC, worth_ns DESC, step_ns DESC, step LIMIT {{limit:UInt64}}
"""
"""Costliest first; those that are not clear after those that are."""

STEPS_BETWEEN = f"""
SELECT step {_from("step_verdicts")}
WHERE run_id = {{run:String}} AND step >= {{first:UInt64}} AND step <= {{last:UInt64}}
ORDER BY step LIMIT {{limit:UInt64}}
"""

RANK_STEPS = f"""
SELECT
    rank, microbatch, world_size, ep_group, ep_rank, ep_size, toString(forward_mode) AS forward_mode,
    toString(cohort) AS cohort, toString(model_name) AS model_name, toString(model_version) AS model_version,
    toString(host_name) AS host_name, toString(clock) AS clock, sample_period, placement_version, warmup,
    toUnixTimestamp64Nano(start_time) AS start_ns, duration_ns, anchor_error_ns
{_read("rank_steps")} AND late = 0
ORDER BY rank, microbatch
"""

PHASE_ROWS = f"""
SELECT
    rank, layer, toString(phase) AS phase, toString(direction) AS direction, microbatch, ordinal, stream,
    flags, toUnixTimestamp64Nano(start_time) AS start_ns, duration_ns, bytes, rows
{_read("phase_spans")}
ORDER BY rank, start_ns, duration_ns, layer, ordinal
"""

VERDICT = f"""
SELECT
    step, toUnixTimestamp64Nano(step_time) AS start_ns, toString(forward_mode) AS forward_mode,
    toString(evidence) AS evidence, reason, rank, layer, toString(phase) AS phase,
    toString(cause) AS cause, worth_ns, share,
    runner_up_rank, runner_up_layer, toString(runner_up_phase) AS runner_up_phase, runner_up_worth_ns,
    step_ns, extension_ns, CAST(phase_ns, 'Map(String, Int64)') AS phase_ns,
    world_size, missing_ranks, toString(closed_by) AS closed_by, warmup
{_read("step_verdicts")}
"""

RECEIVED_ROWS = f"""
SELECT rank, sum(count) AS total
{_read("expert_loads")} AND count_kind = 'received'
GROUP BY rank ORDER BY rank
"""

MAX_MEAN = f"""
SELECT mode, at_layer, max(pairs) * count() / sum(pairs) AS ratio
FROM
(
    SELECT toString(forward_mode) AS mode, layer AS at_layer, expert, sum(count) AS pairs
    {_read("expert_loads")} AND count_kind = 'routed'
    GROUP BY mode, at_layer, expert
)
GROUP BY mode, at_layer HAVING sum(pairs) > 0
ORDER BY mode, at_layer
"""
