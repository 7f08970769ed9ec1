"""Joined steps and their verdicts in memory -> RunView, so that the views of a store show files as well.

Pure. The same sums that the store's queries make: warm-up is left out of loads and extensions, and loads by
rank also leave out steps that miss ranks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from moetrace_collectors.model import BarrierResult, JoinedStep, RankStep, StepVerdict
from moetrace_collectors.views.load_figures import max_mean_ratio, run_imbalance
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
from moetrace_collectors.views.worst_step import lanes_to_show, worst_step
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import (
    COUNT_KIND_BY_CODE,
    COUNT_KIND_CODE,
    DIRECTION_BY_CODE,
    PHASE_BY_CODE,
    PHASE_CODE,
    CountKind,
    Phase,
)

_ROUTED, _RECEIVED = COUNT_KIND_CODE[CountKind.ROUTED], COUNT_KIND_CODE[CountKind.RECEIVED]
_DISPATCH = PHASE_CODE[Phase.DISPATCH]

Judged = tuple[JoinedStep, StepVerdict]


def run_views(joined: Sequence[JoinedStep], verdicts: Sequence[StepVerdict]) -> tuple[RunView, ...]:
    """One view per run, in order of run id."""
    by_run: dict[str, list[Judged]] = defaultdict(list)
    for step, verdict in zip(joined, verdicts, strict=True):
        by_run[step.run_id].append((step, verdict))
    return tuple(_run_view(run_id, by_run[run_id]) for run_id in sorted(by_run))


def _run_view(run_id: str, judged: Sequence[Judged]) -> RunView:
    rows = tuple(judged_step_row(step, verdict) for step, verdict in judged)
    drawn = worst_step(rows)
    step, verdict = next(pair for pair in judged if pair[0].step == drawn.step)
    everyone = [one for step, _ in judged for one in step.rank_steps]
    counted = [step for step, _ in judged if not any(one.warmup for one in step.rank_steps)]
    whole = [one for one in counted if not one.missing_ranks]
    expert_loads = _matrices(_expert_cells(one for step in counted for one in step.rank_steps))
    rank_loads = _matrices(_rank_cells(one for step in whole for one in step.rank_steps))
    return RunView(
        overview=_overview(run_id, judged, everyone),
        steps=rows,
        imbalance=run_imbalance(expert_loads, rank_loads, _step_p95(counted)),
        expert_loads=expert_loads,
        rank_loads=rank_loads,
        traffic=_traffic([one for step in counted for one in step.rank_steps]),
        extensions=_extensions(verdict for _, verdict in judged if not verdict.warmup),
        detail=_detail(step, verdict, drawn),
        accounting=_accounting(judged, everyone),
    )


def judged_step_row(step: JoinedStep, verdict: StepVerdict) -> StepRow:
    """A verdict as the views show it."""
    return StepRow(
        step=step.step,
        start_unix_ns=min(one.start_unix_ns for one in step.rank_steps),
        forward_mode=verdict.forward_mode,
        evidence=verdict.evidence,
        reason=verdict.reason,
        suspect=verdict.suspect,
        cause=verdict.cause,
        runner_up=verdict.runner_up,
        step_ns=verdict.step_ns,
        extension_ns=verdict.extension_ns,
        phase_ns=verdict.phase_ns,
        world_size=step.world_size,
        missing_ranks=verdict.missing_ranks,
        closed_by=step.closed_by,
        warmup=verdict.warmup,
    )


def _overview(run_id: str, judged: Sequence[Judged], everyone: Sequence[RankStep]) -> RunOverview:
    first = everyone[0]
    return RunOverview(
        run_id=run_id,
        model_name=first.model_name,
        model_version=first.model_version,
        world_size=max(step.world_size for step, _ in judged),
        ranks=tuple(sorted({one.rank for one in everyone})),
        hosts=tuple(sorted({one.host_name for one in everyone if one.host_name})),
        forward_modes=tuple(sorted({one.forward_mode for one in everyone})),
        cohorts=tuple(sorted({one.cohort for one in everyone if one.cohort})),
        clocks=tuple(sorted({one.clock for one in everyone})),
        sample_period=max(one.sample_period for one in everyone),
        steps=len(judged),
        warmup_steps=sum(verdict.warmup for _, verdict in judged),
        first_unix_ns=min(one.start_unix_ns for one in everyone),
        last_unix_ns=max(one.start_unix_ns for one in everyone),
    )


def _accounting(judged: Sequence[Judged], everyone: Sequence[RankStep]) -> Accounting:
    missing: Counter[int] = Counter(rank for step, _ in judged for rank in step.missing_ranks)
    pairs: Counter[str] = Counter()
    for one in everyone:
        for row in one.experts:
            pairs[str(COUNT_KIND_BY_CODE[row.kind])] += int(row.counts.sum())
    return Accounting(
        rank_steps=len(everyone),
        late=0,
        events={},
        unattributed_rejects=0,
        steps_by_closed_by=Counter(step.closed_by for step, _ in judged),
        missing_by_rank=dict(missing),
        pairs_by_kind=dict(pairs),
    )


_Cells = dict[LoadView, dict[tuple[int, int], int]]


def _expert_cells(rank_steps: Iterable[RankStep]) -> _Cells:
    cells: _Cells = defaultdict(lambda: defaultdict(int))
    for one in rank_steps:
        for row in one.experts:
            if row.kind == _ROUTED:
                for expert, count in enumerate(row.counts.tolist()):
                    for view in _views(one):
                        cells[view][row.layer, expert] += count
    return cells


def _rank_cells(rank_steps: Iterable[RankStep]) -> _Cells:
    cells: _Cells = defaultdict(lambda: defaultdict(int))
    for one in rank_steps:
        for row in one.experts:
            if row.kind == _RECEIVED:
                for view in _views(one):
                    cells[view][row.layer, one.rank] += int(row.counts.sum())
    return cells


def _views(one: RankStep) -> tuple[LoadView, LoadView]:
    """The two figures that a rank's counts go into: all cohorts together, and its own."""
    return (
        LoadView(forward_mode=one.forward_mode, cohort=None),
        LoadView(forward_mode=one.forward_mode, cohort=one.cohort),
    )


def _matrices(cells: _Cells) -> tuple[LoadMatrix, ...]:
    cohorts: Counter[str] = Counter(str(view.forward_mode) for view in cells if view.cohort is not None)
    found = []
    for view in sorted(
        cells, key=lambda view: (str(view.forward_mode), view.cohort is not None, view.cohort or "")
    ):
        if view.cohort is not None and cohorts[str(view.forward_mode)] < 2:
            continue  # the same figures as all cohorts together
        layers = tuple(sorted({layer for layer, _ in cells[view]}))
        columns = tuple(sorted({column for _, column in cells[view]}))
        found.append(
            LoadMatrix(
                view=view,
                layers=layers,
                columns=columns,
                counts=tuple(tuple(cells[view].get((layer, c)) for c in columns) for layer in layers),
            )
        )
    return tuple(found)


def _step_p95(counted: Iterable[JoinedStep]) -> dict[tuple[LoadView, int], float]:
    """95th percentile over steps of max/mean, by view (all cohorts) and layer."""
    ratios: dict[tuple[LoadView, int], list[float]] = defaultdict(list)
    for step in counted:
        for view, cells in _expert_cells(step.rank_steps).items():
            if view.cohort is not None:
                continue
            for layer in {layer for layer, _ in cells}:
                ratios[view, layer].append(max_mean_ratio([n for (at, _), n in cells.items() if at == layer]))
    return {key: sorted(values)[math.ceil(0.95 * len(values)) - 1] for key, values in ratios.items()}


def _traffic(rank_steps: Sequence[RankStep]) -> Traffic | None:
    rank_at = {(one.ep_group, one.ep_rank): one.rank for one in rank_steps}
    ranks = tuple(sorted(set(rank_at.values())))
    place = {rank: index for index, rank in enumerate(ranks)}
    rows = np.zeros((len(ranks), len(ranks)), dtype=np.int64)
    sizes = np.zeros_like(rows)
    seen = False
    for one in rank_steps:
        for sent in one.traffic:
            if sent.phase != _DISPATCH:
                continue
            seen = True
            for ep_rank, count in enumerate(sent.rows.tolist()):
                to = rank_at.get((one.ep_group, ep_rank))
                if to is not None:
                    rows[place[one.rank], place[to]] += count
                    sizes[place[one.rank], place[to]] += count * sent.row_bytes
    if not seen:
        return None
    return Traffic(
        ranks=ranks,
        rows=tuple(tuple(row) for row in rows.tolist()),
        bytes=tuple(tuple(row) for row in sizes.tolist()),
    )


def _extensions(verdicts: Iterable[StepVerdict]) -> tuple[RankPhaseExtension, ...]:
    agreed: Counter[tuple[int, Phase]] = Counter()
    ambiguous: Counter[tuple[int, Phase]] = Counter()
    for verdict in verdicts:
        for barrier in verdict.barriers:
            if barrier.releaser_rank >= 0:
                target = ambiguous if barrier.ambiguous else agreed
                target[barrier.releaser_rank, barrier.work_phase] += barrier.extension_ns
    return tuple(
        RankPhaseExtension(
            rank=rank, phase=phase, extension_ns=agreed[rank, phase], ambiguous_ns=ambiguous[rank, phase]
        )
        for rank, phase in sorted({*agreed, *ambiguous})
    )


def _detail(step: JoinedStep, verdict: StepVerdict, row: StepRow) -> StepDetail:
    barriers = tuple(barrier_row(barrier) for barrier in verdict.barriers)
    ranks = tuple(sorted({one.rank for one in step.rank_steps}))
    shown = lanes_to_show(row, ranks, barriers)
    intervals = [interval for one in step.rank_steps if one.rank in shown for interval in _intervals(one)]
    return StepDetail(
        step=step.step,
        ranks=ranks,
        shown_ranks=shown,
        intervals=tuple(sorted(intervals, key=lambda interval: (interval.rank, interval.start_unix_ns))),
        barriers=tuple(sorted(barriers, key=lambda barrier: (barrier.ep_group, barrier.index))),
    )


def barrier_row(barrier: BarrierResult) -> BarrierRow:
    """A judged exchange as the views show it."""
    return BarrierRow(
        ep_group=barrier.ep_group,
        index=barrier.index,
        layer=barrier.layer,
        phase=barrier.phase,
        direction=barrier.direction,
        microbatch=barrier.microbatch,
        ordinal=barrier.ordinal,
        releaser_rank=barrier.releaser_rank,
        work_phase=barrier.work_phase,
        transfer_ns=barrier.transfer_ns,
        extension_ns=barrier.extension_ns,
        ambiguous=barrier.ambiguous,
    )


def _intervals(one: RankStep) -> list[PhaseInterval]:
    rows = one.phases
    return [
        PhaseInterval(
            rank=one.rank,
            ep_group=one.ep_group,
            layer=int(rows.layer[index]),
            phase=PHASE_BY_CODE[int(rows.phase[index])],
            direction=DIRECTION_BY_CODE[int(rows.direction[index])],
            microbatch=int(rows.microbatch[index]) or one.microbatch,
            ordinal=int(rows.ordinal[index]),
            is_barrier=bool(rows.flags[index] & int(RowFlag.BARRIER)),
            stream=int(rows.stream[index]),
            error=bool(rows.flags[index] & int(RowFlag.ERROR)),
            start_unix_ns=one.start_unix_ns + int(rows.start_offset_ns[index]),
            duration_ns=int(rows.duration_ns[index]),
            bytes=int(rows.bytes[index]),
            rows=int(rows.rows[index]),
        )
        for index in range(len(rows))
    ]
