"""Reads a run's newest steps, cheaply enough to do it every second."""

from __future__ import annotations

from moetrace_collectors.errors import UsageError
from moetrace_collectors.views import store_queries as queries
from moetrace_collectors.views.load_figures import run_imbalance
from moetrace_collectors.views.recent_records import RecentRun
from moetrace_collectors.views.store_reader import load_matrices, read_extensions, step_row
from moetrace_collectors.views.store_rows import Parameters, Store

LOAD_STEPS = 8
"""Newest steps whose expert counts are read."""


def read_recent(store: Store, run_id: str | None, *, limit: int) -> RecentRun | None:
    """The newest `limit` joined steps of a run; None where the store holds no joined step yet.

    Args:
        store: Where the rows are.
        run_id: Which run; None for the one with the newest step.
        limit: Steps, 1 or more.

    Raises:
        UsageError: the store does not answer, or does not hold that run.
    """
    chosen = run_id
    if chosen is None:
        newest = store.rows(queries.NEWEST_RUN, {})
        if not newest:
            return None
        chosen = str(newest[0]["run_id"])
    numbers = [int(row["step"]) for row in store.rows(queries.NEWEST_STEPS, {"run": chosen, "limit": limit})]
    if not numbers:
        raise UsageError(f"{store.address} holds no joined step of run {chosen!r}: check --run")
    parameters: dict[str, int | str | list[int]] = {
        "run": chosen,
        "limit": limit,
        "first_step": numbers[-1],
    }
    steps = tuple(step_row(row) for row in reversed(store.rows(queries.RECENT_STEPS, parameters)))
    loads_from: Parameters = {**parameters, "first_step": numbers[: min(limit, LOAD_STEPS)][-1]}
    whole_only = int(any(not row.missing_ranks and not row.warmup for row in steps))
    expert_loads = load_matrices(store, loads_from, queries.EXPERT_LOADS)
    rank_loads = load_matrices(store, {**loads_from, "whole_only": whole_only}, queries.RANK_LOADS)
    return RecentRun(
        run_id=chosen,
        steps=steps,
        extensions=read_extensions(store, {**parameters, "whole_only": whole_only}),
        imbalance=run_imbalance(expert_loads, rank_loads, {}),
        expert_loads=expert_loads,
        load_steps=len(numbers[:LOAD_STEPS]),
    )
