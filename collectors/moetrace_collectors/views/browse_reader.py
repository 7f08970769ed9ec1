"""Reads what browsing shows from a store into records: runs, pages of steps, one step, loads and traffic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from moetrace_collectors.errors import UsageError
from moetrace_collectors.views import browse_queries as queries
from moetrace_collectors.views import store_queries
from moetrace_collectors.views.browse_records import (
    LoadSums,
    News,
    RankBudget,
    RunCosts,
    RunEntry,
    StepFacets,
    StepFilter,
    StepPage,
    StepView,
    TrafficBlocks,
)
from moetrace_collectors.views.load_figures import run_imbalance
from moetrace_collectors.views.run_records import (
    BarrierRow,
    LoadMatrix,
    LoadView,
    StepRow,
)
from moetrace_collectors.views.store_reader import (
    load_matrix,
    member,
    read_barriers,
    read_detail,
    read_extensions,
    step_row,
)
from moetrace_collectors.views.store_rows import STORED_ROWS, Parameters, Row, Store
from moetrace_collectors.views.summarise import LAYER_SHARE
from moetrace_collectors.views.timeline import Timeline, lay_out
from moetrace_schemas.enums import ForwardMode, Phase

MAX_RUNS = 200
MAX_LOAD_ROWS = 3_000_000
"""Rows of loads or traffic that are summed for one figure, some two seconds; a step alone may hold more."""
MAX_BLOCKS = 64
"""Blocks of ranks along one side of a traffic matrix."""


def read_runs(store: Store, run_id: str = "") -> tuple[RunEntry, ...]:
    """Runs of the store, the one with the newest step first, at most MAX_RUNS; or one run only."""
    wanted: Parameters = {"run": run_id}
    models = {str(row["run_id"]): row for row in store.rows(queries.RUN_MODELS, wanted)}
    listed = store.rows(queries.RUN_LIST, {**wanted, "limit": MAX_RUNS})
    return tuple(_run_entry(row, models.get(str(row["run_id"]))) for row in listed)


def read_news(store: Store, run_id: str, since: int) -> News:
    """What came to a run since step `since`."""
    row = store.rows(queries.NEWS, {"run": run_id, "since": since})[0]
    return News(
        last_step=int(row["last_step"]) if int(row["num_new"]) or since >= 0 else -1,
        num_new=int(row["num_new"]),
        num_rows=int(row["num_rows"]),
    )


def read_costs(store: Store, run_id: str, *, limit: int) -> RunCosts:
    """The newest `limit` steps of a run and where they were extended.

    Raises:
        UsageError: no such run.
    """
    entries = read_runs(store, run_id)
    if not entries:
        raise UsageError(f"no run {run_id!r} with a joined step is in {store.address}")
    newest = store.rows(store_queries.STEPS, {"run": run_id, "limit": limit})
    steps = tuple(step_row(row) for row in reversed(newest))
    parameters: Parameters = {
        "run": run_id,
        "first_step": steps[0].step,
        "whole_only": int(any(not row.missing_ranks and not row.warmup for row in steps)),
    }
    return RunCosts(
        entry=entries[0],
        steps=steps,
        by_rank=read_extensions(store, parameters),
        by_layer={
            (int(row["layer"]), member(Phase, row["phase"])): int(row["total_ns"])
            for row in store.rows(queries.LAYER_EXTENSIONS, parameters)
        },
        layer_of_rank={
            int(row["rank"]): int(row["most"])
            for row in store.rows(queries.RANK_LAYERS, parameters)
            if int(row["most_ns"]) >= LAYER_SHARE * int(row["total_ns"]) > 0
        },
    )


def read_step_page(
    store: Store, run_id: str, wanted: StepFilter, *, order: str, page: int, size: int, upto: int = -1
) -> StepPage:
    """One page of a run's steps.

    Args:
        store: Where the rows are.
        run_id: Which run.
        wanted: Which of its steps.
        order: A name of `browse_queries.STEP_ORDERS`.
        page: From 0.
        size: Rows of a page.
        upto: Leave newer steps out; -1 for none.
    """
    parameters: Parameters = {
        "run": run_id,
        "evidence": wanted.evidence,
        "cause": wanted.cause,
        "phase": wanted.phase,
        "mode": wanted.forward_mode,
        "rank": wanted.rank,
        "slower_ns": wanted.slower_ns,
        "text": wanted.text,
        "upto": upto,
    }
    counted = store.rows(queries.STEP_COUNT, parameters)[0]
    facets = store.rows(queries.STEP_FACETS, {"run": run_id})[0]
    rows = store.rows(queries.STEP_PAGES[order], {**parameters, "limit": size, "offset": page * size})
    return StepPage(
        rows=tuple(step_row(row) for row in rows),
        total=int(counted["num_steps"]),
        last_step=int(counted["last_step"]),
        newest_step=int(facets["newest"]),
        facets=StepFacets(
            evidences=_words(facets["evidences"]),
            causes=_words(facets["causes"]),
            phases=_words(facets["phases"]),
            forward_modes=_words(facets["modes"]),
        ),
    )


def read_step(store: Store, run_id: str, step: int) -> StepView:
    """One step over all of its ranks.

    Raises:
        UsageError: the run has no such joined step.
    """
    parameters: Parameters = {"run": run_id, "step": step}
    row = _step(store, parameters)
    near = store.rows(queries.NEIGHBOURS, parameters)[0]
    barriers = read_barriers(store, run_id, step)
    return StepView(
        row=row,
        before=int(near["before"]) if int(near["num_before"]) else None,
        behind=int(near["behind"]) if int(near["num_behind"]) else None,
        budgets=_budgets(store, parameters, barriers),
        barriers=barriers,
    )


def read_timeline(store: Store, run_id: str, step: int, *, lanes: Sequence[int] | None = None) -> Timeline:
    """One step as it can be drawn; `lanes` are the ranks to draw, None to choose them.

    Raises:
        UsageError: the run has no such joined step.
    """
    row = _step(store, {"run": run_id, "step": step})
    detail = read_detail(store, run_id, row, lanes=lanes)
    return lay_out(detail, critical_rank=row.suspect.rank if row.suspect else None)


def read_loads(
    store: Store, run_id: str, *, mode: ForwardMode | None, cohort: str = "", num_steps: int
) -> LoadSums | None:
    """Loads over the newest steps of a forward mode (None: the one with the newest step).

    A cohort narrows them to its own rows, of those of these steps that hold any.

    None where the run has no step outside warm-up.
    """
    modes, chosen = _choose_mode(store, run_id, mode)
    if chosen is None:
        return None
    steps = _newest_steps(store, run_id, chosen, num_steps, queries.LOAD_ROWS)
    if cohort:
        in_cohort = store.rows(queries.COHORT_STEPS, {"run": run_id, "steps": steps, "cohort": cohort})
        steps = sorted(int(row["step"]) for row in in_cohort)
    view = LoadView(forward_mode=chosen, cohort=cohort or None)
    asked: Parameters = {
        "run": run_id,
        "steps": steps,
        "mode": str(chosen),
        "cohort": cohort,
        **_stored_rows(store, run_id, steps, queries.LOAD_ROWS),
    }
    matrices = {column: _load_matrix(store, asked, column, view) for column in queries.LOADS}
    experts, ranks = matrices["expert"], matrices["rank"]
    return LoadSums(
        forward_modes=modes,
        forward_mode=chosen,
        cohorts=_words(store.rows(queries.COHORTS, {"run": run_id})[0]["cohorts"]),
        cohort=cohort,
        steps=tuple(steps),
        experts=experts,
        ranks=ranks,
        imbalance=run_imbalance([experts] if experts else [], [ranks] if ranks else [], {}),
    )


def read_traffic_blocks(
    store: Store,
    run_id: str,
    *,
    mode: ForwardMode | None,
    num_steps: int,
    sources: tuple[int, int] | None = None,
    destinations: tuple[int, int] | None = None,
) -> TrafficBlocks | None:
    """Traffic between ranks, or between blocks of them where they are many.

    Args:
        store: Where the rows are.
        run_id: Which run.
        mode: Forward mode; None for the one with the newest step.
        num_steps: Over how many of its newest steps.
        sources: First and last rank to look at; None for all.
        destinations: The same for receivers.

    Returns:
        None where the run has no step outside warm-up.
    """
    modes, chosen = _choose_mode(store, run_id, mode)
    if chosen is None:
        return None
    steps = _newest_steps(store, run_id, chosen, num_steps, queries.TRAFFIC_ROWS)
    at_steps: Parameters = {"run": run_id, "steps": steps}
    places = store.rows(queries.TRAFFIC_RANKS, at_steps)[0]
    last = int(places["last_rank"])
    from_first, from_last = _within(sources, last)
    to_first, to_last = _within(destinations, last)
    widest = max(from_last - from_first, to_last - to_first) + 1
    block = 1 << max(0, math.ceil(math.log2(widest / MAX_BLOCKS)))
    stored = _stored_rows(store, run_id, steps, queries.TRAFFIC_ROWS, int(places["num_rank_steps"]))
    limits = {"from_first": from_first, "from_last": from_last, "to_first": to_first, "to_last": to_last}
    cells = {
        (int(row["source"]), int(row["destination"])): (int(row["total_rows"]), int(row["total_bytes"]))
        for row in store.rows(queries.TRAFFIC_BLOCKS, {**at_steps, **limits, "block": block, **stored})
    }
    from_blocks = range(from_first // block, from_last // block + 1)
    to_blocks = range(to_first // block, to_last // block + 1)
    return TrafficBlocks(
        forward_modes=modes,
        forward_mode=chosen,
        steps=tuple(steps),
        ranks=last + 1,
        block=block,
        sources=tuple(block * index for index in from_blocks),
        destinations=tuple(block * index for index in to_blocks),
        rows=tuple(tuple(cells.get((a, b), (0, 0))[0] for b in to_blocks) for a in from_blocks),
        bytes=tuple(tuple(cells.get((a, b), (0, 0))[1] for b in to_blocks) for a in from_blocks),
    )


def _run_entry(row: Row, model: Row | None) -> RunEntry:
    # Rank steps pass their time to live before verdicts do.
    model = model or {"name": "", "version": "", "hosts": 0, "period": 1}
    return RunEntry(
        run_id=str(row["run_id"]),
        model_name=str(model["name"]),
        model_version=str(model["version"]),
        ranks=int(row["ranks"]),
        hosts=int(model["hosts"]),
        sample_period=int(model["period"]),
        forward_modes=tuple(member(ForwardMode, mode) for mode in row["modes"]),
        steps=int(row["num_steps"]),
        warmup_steps=int(row["num_warmup"]),
        last_step=int(row["last_step"]),
        first_unix_ns=int(row["first_ns"]),
        last_unix_ns=int(row["last_ns"]),
        clear_steps=int(row["num_clear"]),
        ambiguous_steps=int(row["num_ambiguous"]),
        step_median_ns=int(row["median_ns"]),
        step_p95_ns=int(row["p95_ns"]),
    )


def _words(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(value) for value in values if value)


def _step(store: Store, parameters: Parameters) -> StepRow:
    found = store.rows(queries.ONE_STEP, parameters)
    if not found:
        raise UsageError(f"run {parameters['run']!r} has no joined step {parameters['step']}")
    return step_row(found[0])


def _budgets(store: Store, parameters: Parameters, barriers: Sequence[BarrierRow]) -> tuple[RankBudget, ...]:
    transfers: dict[int, int] = defaultdict(int)
    for barrier in barriers:
        if barrier.phase in (Phase.DISPATCH, Phase.COMBINE):  # not the tail, which is no exchange
            transfers[barrier.ep_group] += barrier.transfer_ns
    budgets = []
    for row in store.rows(queries.RANK_BUDGETS, parameters):
        exchange_ns, group = int(row["exchange_ns"]), int(row["in_group"])
        transfer_ns = min(exchange_ns, transfers[group])
        budgets.append(
            RankBudget(
                rank=int(row["rank"]),
                ep_group=group,
                work_ns=int(row["work_ns"]),
                transfer_ns=transfer_ns,
                wait_ns=exchange_ns - transfer_ns,
            )
        )
    return tuple(budgets)


def _choose_mode(
    store: Store, run_id: str, mode: ForwardMode | None
) -> tuple[tuple[ForwardMode, ...], ForwardMode | None]:
    newest = {
        member(ForwardMode, row["forward_mode"]): int(row["last_step"])
        for row in store.rows(queries.NEWEST_MODES, {"run": run_id})
    }
    if mode is not None and mode not in newest:
        raise UsageError(f"run {run_id!r} has no step of forward mode {mode} outside warm-up")
    return tuple(newest), mode or max(newest, key=newest.__getitem__, default=None)


def _newest_steps(store: Store, run_id: str, mode: ForwardMode, num_steps: int, rows_query: str) -> list[int]:
    """Ascending; cut down to what can be summed while a person waits."""
    asked: Parameters = {"run": run_id, "mode": str(mode), "limit": num_steps}
    steps = [int(row["step"]) for row in store.rows(queries.NEWEST_COUNTED, asked)]
    per_step = int(store.rows(rows_query, {"run": run_id, "steps": steps[:1]})[0]["num_rows"])
    affordable = max(1, MAX_LOAD_ROWS // max(1, per_step))
    return sorted(steps[:affordable])


def _stored_rows(store: Store, run_id: str, steps: list[int], rows_query: str, others: int = 0) -> Parameters:
    """How many rows the steps have, and how many `others` the sum rests on."""
    counted = store.rows(rows_query, {"run": run_id, "steps": steps})[0]["num_rows"]
    return {STORED_ROWS: f"{counted} {others}"}


def _load_matrix(store: Store, parameters: Parameters, column: str, view: LoadView) -> LoadMatrix | None:
    cells = {
        (int(row["layer"]), int(row["place"])): int(row["total"])
        for row in store.rows(queries.LOADS[column], parameters)
    }
    return load_matrix(view, cells) if cells else None


def _within(limits: tuple[int, int] | None, last: int) -> tuple[int, int]:
    if limits is None:
        return 0, last
    return max(0, min(limits[0], last)), max(0, min(limits[1], last))
