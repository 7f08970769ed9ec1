"""The options side by side: stay, move, replicate, shard, limit rates, smaller batches, router. Pure.

All are scored on the same held-out windows with the same costs. What an option needs beyond a placement (a
kernel for half an expert, an experiment on quality) is said with it, because a time alone would not tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from moetrace_collectors.load.figures import max_mean_ratio
from moetrace_collectors.load.series import LoadSeries
from moetrace_collectors.model import FloatArray
from moetrace_collectors.number_format import count
from moetrace_collectors.placement.migration import Migration
from moetrace_collectors.placement.replay import (
    PlannerResult,
    ReplayCase,
    break_even_s,
    folds,
    part_saved,
    replay_planner,
    scored_ms,
    step_ms,
    sync_bytes,
)
from moetrace_collectors.placement.step_time_planner import StepTimePlanner

SMALLER_BATCH = 0.75
"""Batch of the no-move option, over the recorded one."""


class Option(StrEnum):
    """What people can do about an uneven load."""

    STAY = "stay"
    MOVE = "move"
    REPLICATE = "replicate"
    SHARD = "shard"
    LIMIT_RATES = "limit_rates"
    SMALLER_BATCHES = "smaller_batches"
    CHANGE_ROUTER = "change_router"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alternative:
    """One option, scored."""

    option: Option
    note: str
    """What it is, and what it needs."""
    possible: bool = True
    step_ms: float | None = None
    """Predicted time of a step's experts and exchanges on held-out windows; None where it cannot be told."""
    saved: float | None = None
    """Part of a step that it saves; below 0 it costs."""
    migration: Migration | None = None
    break_even_s: float | None = None
    memory_gb: float = 0.0
    """More (or less) weights per rank than today, 1e9 bytes."""
    sync_bytes: float = 0.0
    """Gradients that replicas exchange per training step beyond today's, over all ranks; 0 in serving."""
    throughput: float | None = None
    """Tokens per second over today's, where the option changes what is served."""
    result: PlannerResult | None = None


def alternatives(
    case: ReplayCase, planned: Sequence[PlannerResult], cohorts: Sequence[LoadSeries] = ()
) -> tuple[Alternative, ...]:
    """Every option for a case; `planned` are the planners replayed on its slots."""
    stay_ms = scored_ms(case, case.today)
    # Planners that know no limit on moves are shown, and not recommended beyond it.
    allowed = [
        result for result in planned if case.max_moves is None or result.migration.copies <= case.max_moves
    ]
    best = max(allowed or planned, key=lambda result: result.saved)
    slots_today = case.today.num_slots
    if case.num_slots > slots_today:
        replicated, moved = best, replay_planner(case, StepTimePlanner(), num_slots=slots_today)
    else:
        more = case.num_slots + case.cost.topology.num_ranks
        moved, replicated = best, replay_planner(case, StepTimePlanner(), num_slots=more)
    return (
        Alternative(option=Option.STAY, step_ms=stay_ms, saved=0.0, note="keep the placement in use"),
        _planned(case, Option.MOVE, moved),
        _planned(case, Option.REPLICATE, replicated),
        _shard(case, stay_ms),
        _limit_rates(case, cohorts),
        _smaller_batches(case, stay_ms),
        Alternative(
            option=Option.CHANGE_ROUTER,
            possible=False,
            note="listed only: it changes what the model computes, so it needs an evaluation of quality on "
            "held-out data, and loads recorded with the changed router",
        ),
    )


def _planned(case: ReplayCase, option: Option, result: PlannerResult) -> Alternative:
    placement, today = result.placement, case.today
    fits = case.memory.fits(placement.slots_per_rank)
    extra_gb = case.memory.experts_gb(placement.slots_per_rank) - case.memory.experts_gb(today.slots_per_rank)
    what = (
        f"{count(placement.num_slots, 'slot')}, {placement.slots_per_rank} per rank, planned by "
        f"{result.planner}{'' if fits else '; does not fit in memory'}"
    )
    return Alternative(
        option=option,
        step_ms=result.held_out.step_ms if result.held_out else result.step_ms,
        saved=result.saved,
        migration=result.migration,
        break_even_s=result.break_even_s,
        memory_gb=extra_gb,
        sync_bytes=sync_bytes(case, placement),
        possible=fits,
        note=what,
        result=result,
    )


def _shard(case: ReplayCase, stay_ms: float) -> Alternative:
    """Split the hottest expert of every layer's fullest rank over that rank and the lightest of its node."""
    parts = folds(len(case.series.loads), case.windows)
    time, weight = 0.0, 0
    for plan, scored in [(f.plan, f.score) for f in parts] or [(slice(None), slice(None))]:
        share, copies = _sharded(case, case.series.loads[plan].sum(axis=0))
        steps = int(case.series.steps_in_entry[scored].sum())
        time += steps * step_ms(case, scored, case.today, share=share, copies=copies)
        weight += steps
    there = time / weight
    saved = part_saved(case, stay_ms, there)
    topology = case.cost.topology
    moved = Migration(
        copies=case.today.num_layers,
        bytes=case.today.num_layers * case.memory.expert_bytes / 2.0,
        seconds=case.memory.expert_bytes / 2.0 / (topology.node_gb_per_s * 1e9),
    )
    return Alternative(
        option=Option.SHARD,
        step_ms=there,
        saved=saved,
        migration=moved,
        break_even_s=break_even_s(moved, saved),
        possible=topology.ranks_per_node > 1,
        note="the hottest expert of each layer's fullest rank, split over two ranks of a node; at "
        "best, since a half must take half the time, and every row of that expert goes to both ranks",
    )


def _sharded(case: ReplayCase, loads: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[L, E] -> parts of the work and of the rows by rank, both [L, E, R]."""
    today = case.today
    share = today.share
    by_rank = today.rank_loads(loads)
    at = np.arange(len(loads))
    full = by_rank.argmax(axis=1)
    node = case.cost.topology.node_of_rank
    elsewhere = (node[None, :] != node[full][:, None]) | (np.arange(today.num_ranks) == full[:, None])
    partner = np.where(elsewhere, np.inf, by_rank).argmin(axis=1)
    hottest = (loads * share[at, :, full]).argmax(axis=1)
    work, copies = share.copy(), share.copy()
    moved = share[at, hottest, full] / 2.0
    work[at, hottest, full] -= moved
    work[at, hottest, partner] += moved
    copies[at, hottest, partner] += 2.0 * moved
    return work, copies


def _limit_rates(case: ReplayCase, cohorts: Sequence[LoadSeries]) -> Alternative:
    """Without which cohort the load would be most even."""
    everything = case.today.rank_loads(case.series.totals)
    now = float(max_mean_ratio(everything).mean())
    best: tuple[float, LoadSeries] | None = None
    for cohort in cohorts:
        if cohort.loads.shape[1:] != case.series.loads.shape[1:]:
            continue
        rest = np.maximum(everything - case.today.rank_loads(cohort.totals), 0.0)
        ratio = float(max_mean_ratio(rest).mean())
        if rest.any() and (best is None or ratio < best[0]):
            best = (ratio, cohort)
    note = "the recording tells no cohorts apart, so there is none to limit: record cohorts"
    if best is not None:
        ratio, cohort = best
        part = cohort.pairs / case.series.pairs
        note = (
            f"without cohort {cohort.cohort} ({100 * part:.0f} % of the pairs) mean max/mean over ranks "
            f"would be {ratio:.2f} instead of {now:.2f}"
        )
    return Alternative(option=Option.LIMIT_RATES, possible=best is not None, note=note)


def _smaller_batches(case: ReplayCase, stay_ms: float) -> Alternative:
    """The same imbalance on fewer rows: shorter steps, and less per second where a step has a fixed part."""
    layers = int((case.series.totals.sum(axis=1) > 0).sum())
    fixed = case.cost.passes * case.cost.gemm.start_us * layers / 1e3
    there = fixed + SMALLER_BATCH * max(stay_ms - fixed, 0.0)
    saved = part_saved(case, stay_ms, there)
    return Alternative(
        option=Option.SMALLER_BATCHES,
        step_ms=there,
        saved=saved,
        throughput=SMALLER_BATCH / (1.0 - saved),
        note=f"{100 * SMALLER_BATCH:.0f} % of the tokens per step: steps get shorter but not more even, and "
        "fewer tokens get through per second",
    )
