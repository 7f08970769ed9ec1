"""Honest replay: every planner plans on the past and is scored on the future. Pure; the clock is handed in.

::

    entries   |== window 0 ==|== window 1 ==|== window 2 ==|
    fold 1    |----- plan ---|--- score ----|
    fold 2    |----------- plan ------------|--- score ----|

`held_out` is the score of these plans, `in_sample` that of plans made on the very windows that are scored:
what hindsight would have reached on the same loads. A planner that is good in sample only has learned noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moetrace_collectors.load.balancedness import balancedness_sum
from moetrace_collectors.load.coactivation import CoActivation
from moetrace_collectors.load.expert_map import Placement
from moetrace_collectors.load.series import LoadSeries
from moetrace_collectors.load.stability import window_edges
from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.placement.memory import MemoryBudget
from moetrace_collectors.placement.migration import Migration, migration
from moetrace_collectors.placement.problem import Planner, PlanProblem, never
from moetrace_collectors.placement.step_cost import Basis, StepCost
from moetrace_schemas.enums import ForwardMode


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayCase:
    """What is replayed, and with what costs."""

    series: LoadSeries
    num_slots: int
    cost: StepCost
    memory: MemoryBudget
    today: Placement
    num_groups: int = 1
    """Expert groups of the router."""
    coactivation: CoActivation | None = None
    max_moves: int | None = None
    windows: int = 2
    """Windows of the walk-forward; the first one is only planned on."""
    horizon_s: float = 3600.0
    """How long a placement stays: a move must pay within it, seconds."""
    min_gain: float = 0.01
    """Part of a step that a move must save to be worth anybody's while."""
    plan_seconds: float = 1.0
    """Longest time of one planning, seconds."""
    clock: Callable[[], float] | None = None
    """Seconds that only rise; None: plans take as long as they take."""

    def problem(self, loads: FloatArray, *, num_slots: int | None = None) -> PlanProblem:
        """Planning for loads [S, L, E]; the time starts now.

        Raises:
            UsageError: see PlanProblem.
        """
        out_of_time = never
        if self.clock is not None:
            clock, end = self.clock, self.clock() + self.plan_seconds
            out_of_time = lambda: clock() >= end  # noqa: E731 - a closure over two values
        return PlanProblem(
            windows=loads,
            num_slots=num_slots or self.num_slots,
            topology=self.cost.topology,
            cost=self.cost,
            num_groups=self.num_groups,
            today=self.today,
            coactivation=self.coactivation,
            max_moves=self.max_moves,
            out_of_time=out_of_time,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Entries planned on, and entries scored."""

    plan: slice
    score: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How placements did on the scored windows of all folds."""

    balancedness: float
    """balancedness_sum over layers and windows, loads summed within each window."""
    per_step: float
    """The same with every entry by itself: what steps live through."""
    step_ms: float
    """Mean predicted time of a step's experts and exchanges, all layers."""
    better_folds: int
    """Folds in which the step was shorter than with the placement in use."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannerResult:
    """One planner, replayed."""

    planner: str
    placement: Placement
    """Planned on everything recorded: what would be rolled out now."""
    rank_loads: FloatArray
    """[L, R]: everything recorded, under that placement."""
    balancedness: float
    per_step: float
    step_ms: float
    in_sample: Score | None
    held_out: Score | None
    """None where there is one entry only."""
    migration: Migration
    saved: float
    """Part of a step that it saves on held-out windows (on all entries where there are none)."""
    break_even_s: float | None
    """Seconds until the time lost by migrating is won back; None: never."""
    plan_s: float
    """Time of the planning on everything recorded, seconds; 0 without a clock."""


def folds(num_entries: int, windows: int) -> tuple[Fold, ...]:
    """Walk-forward over equal runs of entries; none where there is one entry only."""
    edges = window_edges(num_entries, min(windows, num_entries)).tolist()
    return tuple(Fold(plan=slice(0, low), score=slice(low, high)) for low, high in list(pairwise(edges))[1:])


def replay_planner(case: ReplayCase, planner: Planner, *, num_slots: int | None = None) -> PlannerResult:
    """Replay one planner.

    Raises:
        UsageError: the case cannot be planned.
    """
    loads = case.series.loads
    began = case.clock() if case.clock else 0.0
    placement = planner.plan(case.problem(loads, num_slots=num_slots))
    plan_s = case.clock() - began if case.clock else 0.0
    parts = folds(len(loads), case.windows)
    held_out = in_sample = None
    if parts:
        past = [planner.plan(case.problem(loads[fold.plan], num_slots=num_slots)) for fold in parts]
        # Hindsight starts from the same placement and has the same limits.
        same = [planner.plan(case.problem(loads[fold.score], num_slots=num_slots)) for fold in parts]
        held_out, in_sample = score(case, parts, past), score(case, parts, same)
    cost = migration(
        case.today, placement, topology=case.cost.topology, expert_bytes=case.memory.expert_bytes
    )
    step = step_ms(case, slice(None), placement)
    saved = _saved(case, parts, held_out, step)
    rank_loads = placement.rank_loads(loads)
    return PlannerResult(
        planner=planner.name,
        placement=placement,
        rank_loads=rank_loads.sum(axis=0),
        balancedness=balancedness_sum(rank_loads.sum(axis=0)),
        per_step=balancedness_sum(rank_loads),
        step_ms=step,
        in_sample=in_sample,
        held_out=held_out,
        migration=cost,
        saved=saved,
        break_even_s=break_even_s(cost, saved),
        plan_s=plan_s,
    )


def score(case: ReplayCase, parts: tuple[Fold, ...], placements: list[Placement]) -> Score:
    """One placement per fold, scored on that fold's windows."""
    loads, steps = case.series.loads, case.series.steps_in_entry
    by_window, by_entry, time, weight, better = [], [], 0.0, 0, 0
    for fold, placement in zip(parts, placements, strict=True):
        rank_loads = placement.rank_loads(loads[fold.score])
        by_window.append(rank_loads.sum(axis=0))
        by_entry.append(rank_loads)
        there = step_ms(case, fold.score, placement)
        better += there < step_ms(case, fold.score, case.today)
        num_steps = int(steps[fold.score].sum())
        time += there * num_steps
        weight += num_steps
    return Score(
        balancedness=balancedness_sum(np.stack(by_window)),
        per_step=balancedness_sum(np.concatenate(by_entry)),
        step_ms=time / weight,
        better_folds=better,
    )


def step_ms(
    case: ReplayCase,
    chosen: slice,
    placement: Placement,
    *,
    share: FloatArray | None = None,
    copies: FloatArray | None = None,
) -> float:
    """Mean predicted time of the experts and exchanges of a step, milliseconds; see StepCost.step_us."""
    steps: IntArray = case.series.steps_in_entry[chosen]
    loads = case.series.loads[chosen] / steps[:, None, None]
    by_layer = case.cost.step_us(
        loads, placement.share if share is None else share, case.coactivation, copies=copies
    )
    mean_us = float((by_layer.sum(axis=1) * steps).sum() / steps.sum())
    return mean_us / 1e3 + _sync_ms(case, placement)


def sync_bytes(case: ReplayCase, placement: Placement) -> float:
    """Gradients that replicas exchange per training step beyond today's, over all ranks; 0 in serving.

    ::

        sum over experts of 2 (replicas - 1) x expert bytes            ring all-reduce
    """
    if case.series.forward_mode is not ForwardMode.TRAIN:
        return 0.0
    extra = int(placement.replica_counts.sum()) - int(case.today.replica_counts.sum())
    return 2.0 * extra * case.memory.expert_bytes


def _sync_ms(case: ReplayCase, placement: Placement) -> float:
    """Exchange of gradients with nothing to hide behind, spread over all ranks."""
    topology = case.cost.topology
    speed = topology.link_gb_per_s if topology.num_nodes > 1 else topology.node_gb_per_s
    return sync_bytes(case, placement) / (topology.num_ranks * speed * 1e9) * 1e3


def scored_ms(case: ReplayCase, placement: Placement) -> float:
    """`step_ms` of one placement over the scored windows (over everything where there are none)."""
    parts = folds(len(case.series.loads), case.windows)
    return (
        score(case, parts, [placement] * len(parts)).step_ms
        if parts
        else step_ms(case, slice(None), placement)
    )


def whole_step_ms(case: ReplayCase, stay_ms: float) -> float:
    """What a saving is a part of: the recorded step, or the experts and exchanges where that tells nothing.

    Assumed times are no milliseconds of this machine, so they are only compared with each other.
    """
    recorded = case.series.step_ms
    if recorded is None or case.cost.gemm.basis is Basis.ASSUMED:
        return stay_ms
    return max(recorded, stay_ms)


def part_saved(case: ReplayCase, stay_ms: float, there_ms: float) -> float:
    """Part of a step that is saved; 0 where nothing ran in the scored windows."""
    whole = whole_step_ms(case, stay_ms)
    return (stay_ms - there_ms) / whole if whole > 0.0 else 0.0


def break_even_s(cost: Migration, saved: float) -> float | None:
    """Seconds until a migration that stops everything is paid for; None: it never is."""
    if cost.copies == 0 and saved >= 0.0:
        return 0.0
    return cost.seconds / saved if saved > 0.0 else None


def _saved(case: ReplayCase, parts: tuple[Fold, ...], held_out: Score | None, in_all: float) -> float:
    if held_out is None:
        stay = step_ms(case, slice(None), case.today)
        return part_saved(case, stay, in_all)
    stay = score(case, parts, [case.today] * len(parts)).step_ms
    return part_saved(case, stay, held_out.step_ms)
