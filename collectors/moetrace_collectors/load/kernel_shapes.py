"""The shapes that grouped GEMMs really see: rows per expert and rank, as a weighted list of problems. Pure.

A kernel that is judged on one large balanced shape says nothing about a decode step in which one expert has
300 rows and forty have two. A problem is one rank's grouped GEMM in one layer and step: the rows of each of
its slots. Problems are drawn in strata of equal frequency over their total rows, and each carries how many
measured ones it stands for, so that a weighted sum over them is the measured mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrace_collectors.load.expert_map import EMPTY, Placement
from moetrace_collectors.model import FloatArray, IntArray

MAX_BINS = 64
"""Bins of the histogram; up to this many different values each have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedProblem:
    """One grouped GEMM: `rows[g]` x K by K x N for each group g."""

    step: int
    """Index of the step it was taken from."""
    layer: int
    """Index of the layer."""
    rank: int
    rows: tuple[int, ...]
    """M of each group, slots of the rank in order; zeros are groups that the kernel still visits."""
    weight: int
    """Measured problems that this one stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsBin:
    """How many (step, layer, slot) of a rank had from `low` to `high` rows, both included."""

    rank: int
    low: int
    high: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShapes:
    """Histogram per rank, and problems that stand for the whole mix."""

    histogram: tuple[RowsBin, ...]
    problems: tuple[GroupedProblem, ...]
    measured_problems: int
    """Steps x layers x ranks with any row."""


def kernel_shapes(loads: FloatArray, placement: Placement, *, max_problems: int = 64) -> KernelShapes:
    """Shapes of loads [S, L, E] under a placement.

    Rows of an expert with replicas are split as evenly as whole rows can be, earlier slots taking the rest.
    """
    rows = _slot_rows(loads, placement)
    steps, layers, _ = rows.shape
    by_rank = rows.reshape(steps, layers, placement.num_ranks, -1)
    totals = by_rank.sum(axis=-1)
    used = np.flatnonzero(totals.ravel())
    order = used[np.argsort(totals.ravel()[used], kind="stable")]
    edges = np.arange(min(max_problems, len(order)) + 1) * len(order) // max(min(max_problems, len(order)), 1)
    problems = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        chosen = int(order[(low + high - 1) // 2])
        step, layer, rank = np.unravel_index(chosen, totals.shape)
        problems.append(
            GroupedProblem(
                step=int(step),
                layer=int(layer),
                rank=int(rank),
                rows=tuple(by_rank[step, layer, rank].tolist()),
                weight=high - low,
            )
        )
    return KernelShapes(histogram=_histogram(by_rank), problems=tuple(problems), measured_problems=len(used))


def _slot_rows(loads: FloatArray, placement: Placement) -> IntArray:
    """[S, L, E] -> [S, L, slots]: whole rows; they sum to the rows of the experts."""
    slots = placement.physical_to_logical
    held = np.where(slots == EMPTY, 0, slots)
    counts = np.take_along_axis(placement.replica_counts, held, axis=1)
    experts = np.take_along_axis(
        np.rint(loads).astype(np.int64), np.broadcast_to(held, (*loads.shape[:1], *held.shape)), axis=2
    )
    rows: IntArray = experts // counts + (_ordinals(slots) < experts % counts)
    return np.where(slots == EMPTY, 0, rows)


def _ordinals(slots: IntArray) -> IntArray:
    """[L, S]: how many earlier slots of the layer hold the same expert."""
    order = np.argsort(slots, axis=1, kind="stable")
    ordered = np.take_along_axis(slots, order, axis=1)
    index = np.broadcast_to(np.arange(slots.shape[1]), slots.shape)
    begins = np.where(np.diff(ordered, axis=1, prepend=-2) != 0, index, 0)
    ordinals = np.empty_like(slots)
    np.put_along_axis(ordinals, order, index - np.maximum.accumulate(begins, axis=1), axis=1)
    return ordinals


def _histogram(by_rank: IntArray) -> tuple[RowsBin, ...]:
    """[S, L, R, s]: bins that are the same for every rank, empty ones left out."""
    values = np.unique(by_rank)
    if len(values) <= MAX_BINS:
        lows = values
        highs = values
    else:
        largest = int(values[-1])
        edges = np.unique(np.rint(np.geomspace(1, largest + 1, MAX_BINS)).astype(np.int64))
        lows = np.concatenate([[0], edges[:-1]])
        highs = np.concatenate([[0], edges[1:] - 1])
    bins = []
    for rank in range(by_rank.shape[2]):
        place = np.searchsorted(lows, by_rank[:, :, rank].ravel(), side="right") - 1
        counts = np.bincount(place, minlength=len(lows))
        bins += [
            RowsBin(rank=rank, low=int(low), high=int(high), count=int(count))
            for low, high, count in zip(lows, highs, counts, strict=True)
            if count
        ]
    return tuple(bins)
