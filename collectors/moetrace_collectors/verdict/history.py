"""What calm looks like: a bounded rolling window of past steps of one run and forward mode.

Two figures per (rank, phase) and step are kept, as parts of the step's length so that steps of unequal length
compare:

- worth: its summed extensions (attribution.py). One step's worth is judged against what the *other* ranks
  reach, in any phase, for a scheduler takes a core away in whatever phase is running. Others are freed of their
  own persistent excess first. So neither a rank that is slow in every step, nor one that is slow now and then,
  nor a second slow rank raises the bar that it is measured with::

      rank 3 (slow)   .12 .11 .12 .12      never part of its own bar
      rank 5          .01 .00 .02 .01  \\
      rank 6          .00 .02 .00 .01   >  largest per step .01 .02 .02 .01 -> bar
      rank 7          .00 .01 .00 .00  /

- deviation: its work minus the mean over ranks, summed with its sign, so that noise cancels over exchanges. Its
  median over recent steps is the rank's level, which single hiccups do not move: a fault too small for one
  step to show is seen in its level. The noise of a level is the spread of deviations *around* each rank's own
  level, so a fault that has been there since the first step does not hide itself.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.verdict.sequence import NUM_PHASES

WINDOW = 64
"""Steps kept for the bar of a single step."""
LEVEL_WINDOWS = (8, 32)
"""Steps over which a rank's level is taken: the short window sees a new fault soon, the long one a small fault."""
MIN_STEPS = 8
"""Steps before the spread counts as known."""
USUAL_QUANTILE = 0.98
"""Part of past steps below the usual bar: noise rarer than that is reported rather than hidden."""
FALSE_CLEAR = 0.001
"""Chance per step, under an exponential tail, that noise passes the bar with its margin."""
MIN_MARGIN = 1.25

MEDIAN_ERROR = 1.2533
"""Standard error of a median of n normal values, in units of sigma / sqrt(n)."""
MAD_TO_SIGMA = 1.4826


class RunHistory:
    """Past worths and deviations by (rank, phase) of one run and forward mode."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._worth = np.full((WINDOW, num_ranks, NUM_PHASES), np.nan, dtype=np.float32)
        self._deviation = np.full((WINDOW, num_ranks, NUM_PHASES), np.nan, dtype=np.float32)
        self._largest = np.zeros(WINDOW)
        self._largest_rank = np.full(WINDOW, -1, dtype=np.int64)
        self._second = np.zeros(WINDOW)
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, WINDOW)

    def add(self, ranks: IntArray, worth: FloatArray, deviation: FloatArray) -> None:
        """Keep one step: `worth[r, p]` and `deviation[r, p]` of `ranks[r]`, as parts of the step."""
        row = self._count % WINDOW
        self._worth[row] = np.nan
        self._worth[row, ranks] = worth
        self._deviation[row] = np.nan
        self._deviation[row, ranks] = deviation
        self._count += 1
        freed = (worth - self._persistent_excess(ranks)).max(axis=1)
        order = np.argsort(freed, kind="stable")
        self._largest[row], self._largest_rank[row] = freed[order[-1]], ranks[order[-1]]
        self._second[row] = freed[order[-2]] if len(ranks) > 1 else 0.0

    def _persistent_excess(self, ranks: IntArray) -> FloatArray:
        """[R, P]: how far each rank's own recent level of worth lies above the (lower) median rank's."""
        level = _middle(np.nan_to_num(self._worth[self._latest(MIN_STEPS + 1)][:, ranks]))
        excess: FloatArray = np.maximum(level - _lower_middle(level), 0.0)
        return excess

    def _latest(self, count: int) -> IntArray:
        """Rows of the latest steps."""
        return (self._count - 1 - np.arange(min(count, len(self)))) % WINDOW

    def usual(self, rank: int) -> float:
        """The worth, as a part of the step, that ranks other than this one rarely pass in any phase."""
        used = slice(0, len(self))
        if not len(self):
            return 0.0
        others = np.where(self._largest_rank[used] == rank, self._second[used], self._largest[used])
        return float(np.quantile(np.maximum(others, 0.0), USUAL_QUANTILE))

    def margin(self) -> float:
        """Factor from the largest of n past values to one that noise passes with chance FALSE_CLEAR.

        For an exponential tail of scale b the largest of n lies at b (ln n + 0.58) and the bar at
        b ln(1 / chance), so few past steps ask for a wide margin.
        """
        return max(MIN_MARGIN, math.log(1.0 / FALSE_CLEAR) / (math.log(max(len(self), 2)) + 0.5772))

    def level(self, rank: int, phase: int, window: int) -> tuple[float, float]:
        """A rank's level in a phase over the latest steps, and the error of a level, as parts of the step."""
        past = self._deviation[self._latest(window), :, phase]
        own = past[:, rank]
        own = own[~np.isnan(own)]
        past = past[:, ~np.isnan(past).all(axis=0)]
        if not len(own):
            return 0.0, math.inf
        around = np.abs(past - np.nanmedian(past, axis=0))
        sigma = MAD_TO_SIGMA * float(np.nanmedian(around))
        return float(np.median(own)), MEDIAN_ERROR * sigma / math.sqrt(len(own))


def _middle(values: npt.NDArray[np.floating]) -> FloatArray:
    """Upper median over the first axis."""
    middle: FloatArray = np.sort(values, axis=0)[len(values) // 2].astype(np.float64)
    return middle


def _lower_middle(values: FloatArray) -> FloatArray:
    """Lower median over the first axis: of two ranks the calm one."""
    middle: FloatArray = np.sort(values, axis=0)[(len(values) - 1) // 2]
    return middle
