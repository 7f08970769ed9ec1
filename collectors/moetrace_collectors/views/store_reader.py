"""Reads one run from a store into records. The only place that turns rows into records."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from moetrace_collectors.errors import UsageError
from moetrace_collectors.model import Suspect
from moetrace_collectors.views import store_queries as queries
from moetrace_collectors.views.load_figures import run_imbalance
from moetrace_collectors.views.run_records import (
    Accounting,
    BarrierRow,
    LoadMatrix,
    LoadView,
    PhaseInterval,
    RankPhaseExtension,
    RunOverview,
    RunView,
    StepDetail,
    StepRow,
    Traffic,
)
from moetrace_collectors.views.store_damage import damage_of
from moetrace_collectors.views.store_rows import Parameters, Row, Store
from moetrace_collectors.views.worst_step import lanes_to_show, worst_step
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Cause, ClosedBy, Direction, Evidence, ForwardMode, Phase

MAX_STEPS = 50_000
"""Newest joined steps that a view reads; a longer run says so."""

MOST_SHOWN = 128
"""Characters of a run id that a message repeats: no run has a longer one."""

Member = TypeVar("Member", bound=StrEnum)


def choose_run(store: Store, run_id: str | None = None) -> str:
    """The run asked for, or the one with the newest step.

    Raises:
        UsageError: the store is empty or does not hold that run.
    """
    known = [str(row["run_id"]) for row in store.rows(queries.RUNS, {})]
    damage = damage_of(store)
    if not known:
        raise UsageError(f"{store.address} holds no run yet: {damage or 'nothing has been stored there'}")
    if damage:
        print(f"moetrace: {store.address}: {damage}", file=sys.stderr)
    if run_id is None:
        return known[0]
    if run_id not in known:
        run_id = run_id if len(run_id) <= MOST_SHOWN else run_id[:MOST_SHOWN] + "..."
        listed = ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
        raise UsageError(f"{store.address} holds no run {run_id!r}: it holds {listed}")
    return run_id


def read_run(store: Store, run_id: str, *, step: int | None = None) -> RunView:
    """Everything that the views show of one run; `step` is the one to draw (default: the worst).

    Raises:
        UsageError: the run has no joined step, or not that step.
    """
    parameters: dict[str, int | str | list[int]] = {"run": run_id}
    steps = _steps(store, parameters)
    if not steps:
        raise UsageError(
            f"run {run_id!r} has no joined step yet: a step is joined when its last rank arrives "
            "or its window passes (where collectors leave the join to the store: when moetrace join runs)"
        )
    drawn = worst_step(steps) if step is None else _step_asked_for(steps, step)
    parameters["first_step"] = steps[0].step
    parameters["whole_only"] = int(any(not row.missing_ranks and not row.warmup for row in steps))
    expert_loads = load_matrices(store, parameters, queries.EXPERT_LOADS)
    rank_loads = load_matrices(store, parameters, queries.RANK_LOADS)
    overview, accounting = _overview_and_accounting(store, parameters)
    return RunView(
        overview=overview,
        steps=steps,
        imbalance=run_imbalance(expert_loads, rank_loads, _step_ratios(store, parameters)),
        expert_loads=expert_loads,
        rank_loads=rank_loads,
        traffic=_traffic(store, parameters),
        extensions=read_extensions(store, parameters),
        detail=read_detail(store, run_id, drawn),
        accounting=accounting,
    )


def read_extensions(store: Store, parameters: Parameters) -> tuple[RankPhaseExtension, ...]:
    """What ranks added to the critical path, from `first_step` on."""
    return tuple(
        RankPhaseExtension(
            rank=int(row["rank"]),
            phase=member(Phase, row["phase"]),
            extension_ns=int(row["agreed_ns"]),
            ambiguous_ns=int(row["ambiguous_ns"]),
        )
        for row in store.rows(queries.EXTENSIONS, parameters)
    )


def _step_asked_for(steps: tuple[StepRow, ...], step: int) -> StepRow:
    for row in steps:
        if row.step == step:
            return row
    raise UsageError(f"step {step} is not among the run's joined steps ({steps[0].step} to {steps[-1].step})")


def _steps(store: Store, parameters: Parameters) -> tuple[StepRow, ...]:
    rows = store.rows(queries.STEPS, {**parameters, "limit": MAX_STEPS})
    return tuple(step_row(row) for row in reversed(rows))


def step_row(row: Row) -> StepRow:
    """One row of step_verdicts as a record."""
    extension_ns = int(row["extension_ns"])
    return StepRow(
        step=int(row["step"]),
        start_unix_ns=int(row["start_ns"]),
        forward_mode=member(ForwardMode, row["forward_mode"]),
        evidence=member(Evidence, row["evidence"]),
        reason=str(row["reason"]),
        suspect=_suspect(row, "", int(row["worth_ns"]), _finite(row["share"])),
        cause=member(Cause, row["cause"]),
        runner_up=_suspect(
            row,
            "runner_up_",
            int(row["runner_up_worth_ns"]),
            int(row["runner_up_worth_ns"]) / extension_ns if extension_ns else 0.0,
        ),
        step_ns=int(row["step_ns"]),
        extension_ns=extension_ns,
        phase_ns={member(Phase, name): int(value) for name, value in row["phase_ns"].items()},
        world_size=int(row["world_size"]),
        missing_ranks=tuple(int(rank) for rank in row["missing_ranks"]),
        closed_by=member(ClosedBy, row["closed_by"]),
        warmup=bool(row["warmup"]),
    )


def _suspect(row: Row, prefix: str, worth_ns: int, share: float) -> Suspect | None:
    if row[prefix + "rank"] is None or row[prefix + "phase"] is None:
        return None
    layer = row[prefix + "layer"]
    return Suspect(
        rank=int(row[prefix + "rank"]),
        phase=member(Phase, row[prefix + "phase"]),
        layer=None if layer is None else int(layer),
        worth_ns=worth_ns,
        share=share,
    )


def _overview_and_accounting(store: Store, parameters: Parameters) -> tuple[RunOverview, Accounting]:
    row = store.rows(queries.OVERVIEW, parameters)[0]
    closed = store.rows(queries.STEP_COUNTS, parameters)
    overview = RunOverview(
        run_id=str(parameters["run"]),
        model_name=str(row["model_name"]),
        model_version=str(row["model_version"]),
        world_size=int(row["world_size"]),
        ranks=tuple(int(rank) for rank in row["ranks"]),
        hosts=tuple(str(host) for host in row["hosts"] if host),
        forward_modes=tuple(member(ForwardMode, mode) for mode in row["forward_modes"]),
        cohorts=tuple(str(cohort) for cohort in row["cohorts"] if cohort),
        clocks=tuple(str(clock) for clock in row["clocks"]),
        sample_period=int(row["sample_period"]),
        steps=sum(int(group["steps"]) for group in closed),
        warmup_steps=sum(int(group["warmup_steps"]) for group in closed),
        first_unix_ns=int(row["first_ns"]),
        last_unix_ns=int(row["last_ns"]),
    )
    events = store.rows(queries.EVENTS, parameters)
    accounting = Accounting(
        rank_steps=int(row["rank_steps"]),
        late=int(row["late"]),
        events={
            (str(event["kind"]), str(event["reason"])): int(event["events"])
            for event in events
            if not event["unattributed"]
        },
        unattributed_rejects=sum(
            int(event["events"]) for event in events if event["unattributed"] and event["kind"] == "rejected"
        ),
        steps_by_closed_by={member(ClosedBy, group["closed_by"]): int(group["steps"]) for group in closed},
        missing_by_rank={
            int(missing["rank"]): int(missing["steps"]) for missing in store.rows(queries.MISSING, parameters)
        },
        pairs_by_kind={
            str(kind["count_kind"]): int(kind["total"])
            for kind in store.rows(queries.PAIRS_BY_KIND, parameters)
        },
    )
    return overview, accounting


def load_matrices(store: Store, parameters: Parameters, query: str) -> tuple[LoadMatrix, ...]:
    """Per forward mode: all cohorts together, then each cohort where there is more than one."""
    cells: dict[ForwardMode, dict[str, dict[tuple[int, int], int]]] = defaultdict(lambda: defaultdict(dict))
    for row in store.rows(query, parameters):
        mode = member(ForwardMode, row["forward_mode"])
        cells[mode][str(row["cohort"])][int(row["layer"]), int(row["column"])] = int(row["total"])
    matrices = []
    for mode in sorted(cells):
        summed: dict[tuple[int, int], int] = defaultdict(int)
        for cohort_cells in cells[mode].values():
            for key, total in cohort_cells.items():
                summed[key] += total
        matrices.append(load_matrix(LoadView(forward_mode=mode, cohort=None), summed))
        if len(cells[mode]) > 1:
            matrices += [
                load_matrix(LoadView(forward_mode=mode, cohort=cohort), cells[mode][cohort])
                for cohort in sorted(cells[mode])
            ]
    return tuple(matrices)


def load_matrix(view: LoadView, cells: Mapping[tuple[int, int], int]) -> LoadMatrix:
    """Counts by (layer, column) as a matrix."""
    layers = tuple(sorted({layer for layer, _ in cells}))
    columns = tuple(sorted({column for _, column in cells}))
    return LoadMatrix(
        view=view,
        layers=layers,
        columns=columns,
        counts=tuple(tuple(cells.get((layer, column)) for column in columns) for layer in layers),
    )


def _step_ratios(store: Store, parameters: Parameters) -> dict[tuple[LoadView, int], float]:
    return {
        (
            LoadView(forward_mode=member(ForwardMode, row["forward_mode"]), cohort=None),
            int(row["layer"]),
        ): float(row["ratio"])
        for row in store.rows(queries.STEP_RATIOS, parameters)
    }


def _traffic(store: Store, parameters: Parameters) -> Traffic | None:
    sent = store.rows(queries.TRAFFIC, parameters)
    if not sent:
        return None
    places = {
        int(row["rank"]): (int(row["ep_group"]), int(row["ep_rank"]))
        for row in store.rows(queries.RANK_PLACES, parameters)
    }
    rank_at = {place: rank for rank, place in places.items()}
    rows: dict[tuple[int, int], int] = defaultdict(int)
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for row in sent:
        source = int(row["source_rank"])
        destination = (
            rank_at.get((places[source][0], int(row["destination_ep_rank"]))) if source in places else None
        )
        if destination is None:
            continue  # a rank that never reported itself has no global number
        rows[source, destination] += int(row["total_rows"])
        sizes[source, destination] += int(row["total_bytes"])
    ranks = tuple(places)
    return Traffic(ranks=ranks, rows=_square(ranks, rows), bytes=_square(ranks, sizes))


def _square(ranks: Iterable[int], cells: dict[tuple[int, int], int]) -> tuple[tuple[int, ...], ...]:
    ranks = tuple(ranks)
    return tuple(tuple(cells.get((source, destination), 0) for destination in ranks) for source in ranks)


def read_detail(
    store: Store, run_id: str, drawn: StepRow, *, lanes: Sequence[int] | None = None
) -> StepDetail:
    """One step, enough to draw it.

    Args:
        store: Where the rows are.
        run_id: Its run.
        drawn: Its verdict.
        lanes: Ranks to draw, those that sent nothing left out; None to choose them.
    """
    at_step: Parameters = {"run": run_id, "step": drawn.step}
    ranks = tuple(int(row["rank"]) for row in store.rows(queries.STEP_RANKS, at_step))
    barriers = read_barriers(store, run_id, drawn.step)
    present = set(ranks)
    shown = (
        lanes_to_show(drawn, ranks, barriers) if lanes is None else tuple(sorted(present.intersection(lanes)))
    )
    return StepDetail(
        step=drawn.step,
        ranks=ranks,
        shown_ranks=shown,
        intervals=tuple(
            _interval(row) for row in store.rows(queries.INTERVALS, {**at_step, "ranks": list(shown)})
        ),
        barriers=barriers,
    )


def read_barriers(store: Store, run_id: str, step: int) -> tuple[BarrierRow, ...]:
    """Exchanges of one step, by group and index."""
    rows = store.rows(queries.BARRIERS, {"run": run_id, "step": step})
    return tuple(barrier_row(row) for row in rows)


def barrier_row(row: Row) -> BarrierRow:
    """One row of step_barriers as a record."""
    return BarrierRow(
        ep_group=int(row["ep_group"]),
        index=int(row["barrier"]),
        layer=int(row["layer"]),
        phase=member(Phase, row["phase"]),
        direction=member(Direction, row["direction"]),
        microbatch=int(row["microbatch"]),
        ordinal=int(row["ordinal"]),
        releaser_rank=int(row["releaser_rank"]),
        work_phase=member(Phase, row["work_phase"]),
        transfer_ns=int(row["transfer_ns"]),
        extension_ns=int(row["extension_ns"]),
        ambiguous=bool(row["ambiguous"]),
    )


def _interval(row: Row) -> PhaseInterval:
    return PhaseInterval(
        rank=int(row["rank"]),
        ep_group=int(row["ep_group"]),
        layer=int(row["layer"]),
        phase=member(Phase, row["phase"]),
        direction=member(Direction, row["direction"]),
        microbatch=int(row["microbatch"]),
        ordinal=int(row["ordinal"]),
        is_barrier=bool(row["is_barrier"]),
        stream=int(row["stream"]),
        error=bool(int(row["flags"]) & RowFlag.ERROR),
        start_unix_ns=int(row["start_ns"]),
        duration_ns=int(row["duration_ns"]),
        bytes=int(row["bytes"]),
        rows=int(row["rows"]),
    )


def member(kind: type[Member], value: object) -> Member:
    """A member of a closed set by its stored text.

    Raises:
        UsageError: this version does not know it.
    """
    try:
        return kind(str(value))
    except ValueError as error:
        raise UsageError(
            f"the store holds {kind.__name__} {value!r}, which this version does not know: upgrade moetrace"
        ) from error


def _finite(value: object) -> float:
    # JSON rows carry NaN and infinity as null.
    number = float(value) if isinstance(value, int | float) else 0.0
    return number if math.isfinite(number) else 0.0
