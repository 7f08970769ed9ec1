"""What calm looks like: a bounded rolling window of past steps of one run and forward mode.

Two figures per (rank, phase) and step are kept, as parts of the step's length so that steps of unequal length
compare:

- worth: its summed extensions (attribution.py). One step's worth is judged against what the *other* ranks
  reach, in any phase, for a scheduler takes a core away in whatever phase is running. Others are freed of
  their own persistent excess first. So neither a rank that is slow in every step, nor one that is slow now
  and then, nor a second slow rank raises the bar that it is measured with::

      rank 3 (slow)   .12 .11 .12 .12      never part of its own bar
      rank 5          .01 .00 .02 .01  \\
      rank 6          .00 .02 .00 .01   >  largest per step .01 .02 .02 .01 -> bar
      rank 7          .00 .01 .00 .00  /

- deviation: its work minus the mean over ranks, summed with its sign, so that noise cancels over exchanges.
  Its median over recent steps is the rank's level, which single hiccups do not move: a fault too small for
  one step to show is seen in its level. The noise of a level is the spread of deviations *around* each
  rank's own level, so a fault that has been there since the first step does not hide itself.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.verdict.sequence import NUM_PHASES, BoolArray

WINDOW = 64
"""Steps kept for the bar of a single step."""
LEVEL_WINDOWS = (8, 32)
"""A rank's level is taken over so many steps: few see a new fault soon, many see a small one."""
MIN_STEPS = 8
"""Steps before the spread counts as known."""
RARE = 0.98
"""Part of past steps below the bar that, with a margin, a clear spike must pass."""
UNUSUAL = 0.95
"""Part of past steps below the bar from which on a worth is named at all."""
FALSE_CLEAR = 0.001
"""Chance per step, under an exponential tail, that noise passes the bar with its margin."""
MIN_MARGIN = 1.25

SPARE_COLUMNS = 64
"""Ranks remembered beyond twice those of a step, before ranks that have gone are forgotten."""

MEDIAN_ERROR = 1.2533
"""Standard error of a median of n normal values, in units of sigma / sqrt(n)."""
MAD_TO_SIGMA = 1.4826


class RunHistory:
    """Past worths and deviations by (rank, phase) of one run and forward mode."""

    def __init__(self) -> None:
        self._column: dict[int, int] = {}  # rank -> column: a rank's number may be any, their count is not
        self._worth = np.full((WINDOW, 0, NUM_PHASES), np.nan, dtype=np.float32)
        self._deviation = np.full((WINDOW, 0, NUM_PHASES), np.nan, dtype=np.float32)
        self._largest = np.zeros(WINDOW)
        self._largest_rank = np.full(WINDOW, -1, dtype=np.int64)
        self._second = np.zeros(WINDOW)
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, WINDOW)

    def add(self, ranks: IntArray, worth: FloatArray, deviation: FloatArray) -> None:
        """Keep one step: `worth[r, p]` and `deviation[r, p]` of `ranks[r]`, as parts of the step."""
        columns = self._columns(ranks)
        row = self._count % WINDOW
        self._worth[row] = self._deviation[row] = np.nan
        self._worth[row, columns] = worth
        self._deviation[row, columns] = deviation
        self._count += 1
        freed = (worth - self._persistent_excess(columns)).max(axis=1)
        order = np.argsort(freed, kind="stable")
        self._largest[row], self._largest_rank[row] = freed[order[-1]], ranks[order[-1]]
        self._second[row] = freed[order[-2]] if len(ranks) > 1 else 0.0

    def _columns(self, ranks: IntArray) -> IntArray:
        """Columns of these ranks; new ranks get new ones, after those that are gone have lost theirs."""
        if len(self._column) > 2 * len(ranks) + SPARE_COLUMNS:
            present: BoolArray = np.any(~np.isnan(self._worth[:, :, 0]), axis=0)
            kept = [rank for rank, column in self._column.items() if present[column]]
            self._worth, self._deviation = self._worth[:, present], self._deviation[:, present]
            self._column = {rank: column for column, rank in enumerate(kept)}
        for rank in ranks.tolist():
            self._column.setdefault(rank, len(self._column))
        missing = len(self._column) - self._worth.shape[1]
        if missing:
            more = np.full((WINDOW, missing, NUM_PHASES), np.nan, dtype=np.float32)
            self._worth = np.concatenate([self._worth, more], axis=1)
            self._deviation = np.concatenate([self._deviation, more], axis=1)
        return np.array([self._column[rank] for rank in ranks.tolist()], dtype=np.int64)

    def _persistent_excess(self, columns: IntArray) -> FloatArray:
        """[R, P]: how far each rank's own recent level lies above the (lower) median rank's."""
        level = _middle(np.nan_to_num(self._worth[self._latest(MIN_STEPS + 1)][:, columns]))
        excess: FloatArray = np.maximum(level - _lower_middle(level), 0.0)
        return excess

    def _latest(self, count: int) -> IntArray:
        """Rows of the latest steps."""
        return (self._count - 1 - np.arange(min(count, len(self)))) % WINDOW

    def bars(self, rank: int) -> tuple[float, float]:
        """Worths, as parts of the step, that ranks other than this one seldom reach in any phase.

        The first is unusual, the second rare.
        """
        used = slice(0, len(self))
        if not len(self):
            return 0.0, 0.0
        others = np.where(self._largest_rank[used] == rank, self._second[used], self._largest[used])
        unusual, rare = np.quantile(np.maximum(others, 0.0), (UNUSUAL, RARE)).tolist()
        return unusual, rare

    def margin(self) -> float:
        """Factor from the largest of n past values to one that noise passes with chance FALSE_CLEAR.

        For an exponential tail of scale b the largest of n lies at b (ln n + 0.58) and the bar at
        b ln(1 / chance), so few past steps ask for a wide margin.
        """
        return max(MIN_MARGIN, math.log(1.0 / FALSE_CLEAR) / (math.log(max(len(self), 2)) + 0.5772))

    def level(self, rank: int, phase: int, window: int) -> float:
        """A rank's median deviation in a phase over the latest steps, as a part of the step; 0 if unknown."""
        column = self._column.get(rank)
        if column is None or not len(self):
            return 0.0
        own = self._deviation[self._latest(window), column, phase]
        own = own[~np.isnan(own)]
        return float(np.median(own)) if len(own) else 0.0

    def level_error(self, phase: int, window: int) -> float:
        """Standard error of such a level, from the spread of all ranks around their own levels."""
        past = self._deviation[self._latest(window), :, phase]
        past = past[:, ~np.isnan(past).all(axis=0)]
        median = np.median if not np.isnan(past).any() else np.nanmedian
        sigma = MAD_TO_SIGMA * float(median(np.abs(past - median(past, axis=0))))
        return MEDIAN_ERROR * sigma / math.sqrt(len(past))


def _middle(values: npt.NDArray[np.floating]) -> FloatArray:
    """Upper median over the first axis."""
    middle: FloatArray = np.sort(values, axis=0)[len(values) // 2].astype(np.float64)
    return middle


def _lower_middle(values: FloatArray) -> FloatArray:
    """Lower median over the first axis: of two ranks the calm one."""
    middle: FloatArray = np.sort(values, axis=0)[(len(values) - 1) // 2]
    return middle
