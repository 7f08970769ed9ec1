"""The experts' time as a line of their rows: time = start + slope x rows, robust, per exchange and direction.

Part of the cause stage (pure). Points are the other ranks of the suspect's group, in this step and in the
last steps with the same exchanges; Huber weights keep other slow ranks from bending the line. The slope is
held between 0 and the median time per row, so that neither a cloud of equal rows nor an outlier gives a line
that no device has (a negative start or a negative slope).
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.verdict.frontier import GroupFrontier
from moetrace_collectors.verdict.history import MAD_TO_SIGMA
from moetrace_collectors.verdict.sequence import GEMM_CODE, BoolArray

WINDOW = 16
"""Steps kept."""
MAX_RANKS = 32
"""Other ranks used per step, evenly spread: a line needs no more."""
MAX_SEQUENCES = 256
"""Different (group, sequence of exchanges) remembered per run and forward mode."""
HUBER = 1.345
"""Residuals beyond this many sigma count less (95 % efficient for normal noise)."""
ITERATIONS = 5


class GemmHistory:
    """Past (rows, time) of every rank and exchange, by group and sequence of exchanges."""

    def __init__(self) -> None:
        self._steps: OrderedDict[tuple[int, bytes], list[tuple[IntArray, IntArray, IntArray]]] = OrderedDict()

    def add(self, frontier: GroupFrontier) -> None:
        """Keep one step of one group."""
        sequence = frontier.sequence
        if not (sequence.gemm_rows >= 0).any():
            return
        key = (sequence.ep_group, sequence.keys.tobytes())
        steps = self._steps.setdefault(key, [])
        self._steps.move_to_end(key)
        steps.append((sequence.ranks, sequence.gemm_rows, sequence.work_ns[:, :, GEMM_CODE].copy()))
        del steps[:-WINDOW]
        while len(self._steps) > MAX_SEQUENCES:
            self._steps.popitem(last=False)

    def points(
        self, frontier: GroupFrontier, place: int, barriers: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows and times, both [barriers, points], of ranks other than the one at `place`."""
        sequence = frontier.sequence
        key = (sequence.ep_group, sequence.keys.tobytes())
        now = (sequence.ranks, sequence.gemm_rows, sequence.work_ns[:, :, GEMM_CODE])
        rows, times = [], []
        for ranks, past_rows, past_times in [*self._steps.get(key, []), now]:
            others = np.flatnonzero(ranks != sequence.ranks[place])
            others = others[:: -(-len(others) // MAX_RANKS)] if len(others) else others
            rows.append(past_rows[np.ix_(others, barriers)])
            times.append(past_times[np.ix_(others, barriers)])
        return (
            np.concatenate(rows).T.astype(np.float64),
            np.concatenate(times).T.astype(np.float64),
        )


def explained_part(
    frontier: GroupFrontier, place: int, barriers: IntArray, history: GemmHistory
) -> float | None:
    """Part of a rank's excess of experts' time that its rows explain; None where rows are not known.

    ::

        part = sum of slope x (rows - mean rows of the others) / sum of (time - mean time of the others)
    """
    sequence = frontier.sequence
    rows = sequence.gemm_rows[:, barriers].astype(np.float64)
    known = (rows >= 0).all(axis=0)
    if not known.any() or len(rows) < 2:
        return None
    barriers, rows = barriers[known], rows[:, known]
    times = sequence.work_ns[:, barriers, GEMM_CODE].astype(np.float64)
    others = np.arange(len(rows)) != place
    extra_rows = rows[place] - rows[others].mean(axis=0)
    excess = float((times[place] - times[others].mean(axis=0)).sum())
    if excess <= 0.0:
        return None
    slope = robust_slope(*history.points(frontier, place, barriers))
    return float((slope * extra_rows).sum()) / excess


def robust_slope(rows: FloatArray, times: FloatArray) -> FloatArray:
    """[B, n] rows and times -> [B] slopes by iteratively reweighted least squares (Huber), within bounds.

    Points with negative rows are unknown and left out.
    """
    used = rows >= 0
    known = bool(used.all())
    per_row = np.where(used & (rows > 0), times / np.maximum(rows, 1.0), 0.0)
    limit = _median(per_row, used & (rows > 0), known=known and bool((rows > 0).all()))
    weights = used.astype(np.float64)
    slope = limit
    for _ in range(ITERATIONS):
        total = np.maximum(weights.sum(axis=1), 1e-12)
        mean_rows = (weights * rows).sum(axis=1) / total
        mean_times = (weights * times).sum(axis=1) / total
        centred = rows - mean_rows[:, None]
        variance = (weights * centred**2).sum(axis=1) / total
        covariance = (weights * centred * (times - mean_times[:, None])).sum(axis=1) / total
        flat = variance < (0.01 * np.maximum(mean_rows, 1.0)) ** 2  # equal rows tell no slope
        slope = np.where(flat, limit, np.clip(covariance / np.maximum(variance, 1e-12), 0.0, limit))
        residual = np.abs(times - mean_times[:, None] - slope[:, None] * centred)
        scale = np.maximum(MAD_TO_SIGMA * _median(residual, used, known=known), 1e-9)
        weights = used * np.minimum(1.0, HUBER * scale[:, None] / np.maximum(residual, 1e-9))
    return slope


def _median(values: FloatArray, used: BoolArray, *, known: bool) -> FloatArray:
    """Median of each row over its used values; 0 where there are none."""
    if known:
        middle: FloatArray = np.median(values, axis=1)
        return middle
    return np.array(
        [np.median(line[mask]) if mask.any() else 0.0 for line, mask in zip(values, used, strict=True)]
    )
