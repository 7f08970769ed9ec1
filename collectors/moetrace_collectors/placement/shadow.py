"""Shadow mode: a proposed placement scored on traffic that ran under another one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moetrace_collectors.load.balancedness import balancedness_sum
from moetrace_collectors.load.communication import communication_through
from moetrace_collectors.load.expert_map import Placement
from moetrace_collectors.load.figures import max_mean_ratio
from moetrace_collectors.load.series import LoadSeries
from moetrace_collectors.model import FloatArray
from moetrace_collectors.number_format import count
from moetrace_collectors.placement.migration import Migration, migration
from moetrace_collectors.placement.replay import ReplayCase, break_even_s, part_saved, step_ms
from moetrace_collectors.placement.step_cost import Basis

DOCUMENT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShadowScore:
    """What one placement makes of the recorded loads."""

    rank_loads: FloatArray
    """[L, R]: pairs that ranks would get."""
    max_mean: FloatArray
    """[L]: of them."""
    balancedness: float
    cross_node: FloatArray | None
    """[L]: part of the rows that would leave their node; None where sources are not recorded."""
    step_ms: float
    """Mean predicted time of experts and exchanges of a step, all layers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shadow:
    """Today's placement and a proposed one on the same traffic."""

    today: ShadowScore
    proposed: ShadowScore
    migration: Migration
    saved: float
    """Part of a step; below 0 where the proposal is slower."""
    better_steps: float
    """Part of the entries in which the proposal would have been faster."""
    break_even_s: float | None


def newest(series: LoadSeries, entries: int | None) -> LoadSeries:
    """The series with its newest entries only; figures that are sums over all entries stay."""
    if entries is None or entries >= len(series.loads):
        return series
    cut: dict[str, Any] = {
        name: None if getattr(series, name) is None else getattr(series, name)[-entries:]
        for name in ("steps", "steps_in_entry", "loads", "start_s", "received", "received_remote")
    }
    return replace(series, **cut)


def shadow(case: ReplayCase, proposed: Placement) -> Shadow:
    """Score a proposal on the case's loads."""
    today, there = _score(case, case.today), _score(case, proposed)
    cost = migration(case.today, proposed, topology=case.cost.topology, expert_bytes=case.memory.expert_bytes)
    saved = part_saved(case, today.step_ms, there.step_ms)
    by_entry = [_by_entry(case, placement) for placement in (case.today, proposed)]
    return Shadow(
        today=today,
        proposed=there,
        migration=cost,
        saved=saved,
        better_steps=float((by_entry[1] < by_entry[0]).mean()),
        break_even_s=break_even_s(cost, saved),
    )


def _score(case: ReplayCase, placement: Placement) -> ShadowScore:
    series, nodes = case.series, case.cost.topology.num_nodes
    rank_loads = placement.rank_loads(series.loads).sum(axis=0)
    cross = None
    if series.source_counts is not None and series.source_counts.shape[1] == placement.num_ranks:
        sent = communication_through(series.source_counts, placement, row_bytes=None)
        cross = sent.cross_node_ratio(nodes)
    return ShadowScore(
        rank_loads=rank_loads,
        max_mean=max_mean_ratio(rank_loads),
        balancedness=balancedness_sum(rank_loads),
        cross_node=cross,
        step_ms=step_ms(case, slice(None), placement),
    )


def _by_entry(case: ReplayCase, placement: Placement) -> FloatArray:
    loads = case.series.loads / case.series.steps_in_entry[:, None, None]
    times: FloatArray = case.cost.step_us(loads, placement.share, case.coactivation).sum(axis=1)
    return times


def sentence(case: ReplayCase, found: Shadow) -> str:
    """The answer in one line."""
    change = f"{abs(found.saved):.1%} of a step"
    times = "assumed" if case.cost.gemm.basis is Basis.ASSUMED else "recorded"
    if found.saved >= case.min_gain and found.better_steps > 0.5:
        return f"the proposal would save {change} on this traffic ({times} costs): worth a canary"
    if found.saved <= -case.min_gain:
        return f"the proposal would cost {change} on this traffic ({times} costs): do not apply it"
    return f"the proposal would change less than {case.min_gain:.1%} of a step here ({times} costs): leave it"


def shadow_document(
    case: ReplayCase, found: Shadow, *, assumptions: Sequence[str], warnings: Sequence[str]
) -> dict[str, Any]:
    """Plain JSON types; the schema is published as placement_shadow.schema.json."""
    series, topology = case.series, case.cost.topology
    return {
        "document_version": DOCUMENT_VERSION,
        "source": series.source,
        "forward_mode": str(series.forward_mode) if series.forward_mode else None,
        "cohort": series.cohort,
        "steps": int(series.steps_in_entry.sum()),
        "layers": [int(layer) for layer in series.layers],
        "ranks": topology.num_ranks,
        "nodes": topology.num_nodes,
        "times": str(case.cost.gemm.basis),
        "today": _side(found.today),
        "proposed": _side(found.proposed),
        "saved": found.saved,
        "better_steps": found.better_steps,
        "migration": {
            "experts_copied": found.migration.copies,
            "bytes": int(found.migration.bytes),
            "seconds": found.migration.seconds,
        },
        "break_even_s": found.break_even_s,
        "sentence": sentence(case, found),
        "assumptions": list(assumptions),
        "warnings": list(warnings),
    }


def _side(score: ShadowScore) -> dict[str, Any]:
    return {
        "predicted_step_ms": score.step_ms,
        "balancedness_sum": score.balancedness,
        "max_mean_ratio": [float(ratio) for ratio in score.max_mean],
        "rank_loads": [[float(load) for load in layer] for layer in score.rank_loads],
        "cross_node_share": (
            None if score.cross_node is None else [float(share) for share in score.cross_node]
        ),
    }


def shadow_text(
    case: ReplayCase, found: Shadow, *, assumptions: Sequence[str], warnings: Sequence[str]
) -> str:
    """A table for a terminal."""
    lines = [
        f"{case.series.source}, {case.series.name}",
        f"Figures: {case.series.counted.sentence()}",
        f"  {'':<26}{'today':>12}{'proposed':>12}",
    ]
    pairs: list[tuple[str, float | None, float | None]] = [
        ("predicted step, ms", found.today.step_ms, found.proposed.step_ms),
        ("balancedness", found.today.balancedness, found.proposed.balancedness),
        (
            "rank max/mean, worst layer",
            float(found.today.max_mean.max()),
            float(found.proposed.max_mean.max()),
        ),
        ("cross-node share", _mean(found.today.cross_node), _mean(found.proposed.cross_node)),
    ]
    lines += [
        f"  {name:<26}{before:>12.4g}{after:>12.4g}"
        for name, before, after in pairs
        if before is not None and after is not None
    ]
    lines += [
        f"  faster in {found.better_steps:.0%} of the entries; {count(found.migration.copies, 'expert')} to "
        f"copy, {found.migration.bytes / 1e9:.2f} GB, {found.migration.seconds:.3g} s",
        *(f"assumed: {text}" for text in assumptions),
        *(f"warning: {text}" for text in warnings),
        sentence(case, found),
    ]
    return "\n".join(lines) + "\n"


def _mean(shares: FloatArray | None) -> float | None:
    return None if shares is None else float(np.mean(shares))
