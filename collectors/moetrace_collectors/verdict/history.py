"""What calm looks like: a bounded rolling window of past steps of one run and forward mode.

The noise that a suspect must stand out of is what the *other* ranks do in the same phase in the same window,
each freed of its own persistent excess. So neither a rank that is slow in every step, nor one that is slow now and then, nor
another slow rank raises the bar that it is measured with::

    worth / step   rank 3 (slow)    .12 .11 .12 .12     never part of its own bar
                   rank 5           .01 .00 .02 .01  \\
                   rank 6           .00 .02 .00 .01   >  largest per step: .01 .02 .02 .01 -> bar
                   rank 7           .00 .01 .00 .00  /

Worths are kept as parts of their step's length, so steps of unequal length are comparable.
"""

from __future__ import annotations

import math

import numpy as np

from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.verdict.sequence import NUM_PHASES, BoolArray

WINDOW = 64
"""Steps kept."""
MIN_STEPS = 8
"""Steps before the spread counts as known."""
RECENT = 9
"""Steps over which a rank's own level is taken."""
USUAL_QUANTILE = 0.98
"""Part of past steps that stay below the usual bar: rarer noise is reported rather than hidden."""
FALSE_CLEAR = 0.002
"""Chance per step and phase, under an exponential tail, that noise passes the bar."""
STREAK_CHANCE = 1e-4
"""Chance under pure noise of the streak that makes a rank consistently the worst."""
STREAK_WINDOW = 32


class RunHistory:
    """Past worths by (rank, phase) of one run and forward mode."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._worth = np.full((WINDOW, num_ranks, NUM_PHASES), np.nan, dtype=np.float32)
        self._largest = np.zeros((WINDOW, NUM_PHASES))
        self._largest_rank = np.full((WINDOW, NUM_PHASES), -1, dtype=np.int64)
        self._second = np.zeros((WINDOW, NUM_PHASES))
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, WINDOW)

    def add(self, ranks: IntArray, worth: FloatArray) -> None:
        """Keep one step: `worth[r, p]` of `ranks[r]`, as a part of the step's length."""
        row = self._count % WINDOW
        self._worth[row] = np.nan
        self._worth[row, ranks] = worth
        self._count += 1
        freed = worth - self._persistent_excess(ranks)
        order = np.argsort(freed, axis=0)
        phases = np.arange(NUM_PHASES)
        self._largest[row] = freed[order[-1], phases]
        self._largest_rank[row] = ranks[order[-1]]
        self._second[row] = freed[order[-2], phases] if len(ranks) > 1 else 0.0

    def _persistent_excess(self, ranks: IntArray) -> FloatArray:
        """[R, P]: how far each rank's own recent level lies above the (lower) median rank's."""
        recent = self._worth[self._latest(RECENT)][:, ranks]
        level = np.sort(np.nan_to_num(recent), axis=0)[len(recent) // 2]
        middle = np.sort(level, axis=0)[(len(ranks) - 1) // 2]
        excess: FloatArray = np.maximum(level - middle, 0.0)
        return excess

    def _latest(self, count: int) -> IntArray:
        """Rows of the latest steps, newest first."""
        return (self._count - 1 - np.arange(min(count, len(self)))) % WINDOW

    def usual(self, rank: int, phase: int) -> float:
        """The worth, as a part of the step, that ranks other than this one rarely pass in this phase."""
        used = slice(0, len(self))
        others = np.where(
            self._largest_rank[used, phase] == rank, self._second[used, phase], self._largest[used, phase]
        )
        return float(np.quantile(np.maximum(others, 0.0), USUAL_QUANTILE)) if len(others) else 0.0

    def margin(self) -> float:
        """Factor from the largest of n past values to one that noise passes with chance FALSE_CLEAR.

        For an exponential tail of scale b the largest of n lies at b (ln n + 0.58), and the bar at
        b ln(1 / chance): few past steps ask for a wide margin.
        """
        return max(1.2, math.log(1.0 / FALSE_CLEAR) / (math.log(max(len(self), 2)) + 0.5772))

    def lead(self, rank: int, phase: int) -> tuple[float, bool]:
        """Median lead of this rank over the worst other rank, and whether it leads too often for chance."""
        rows = self._latest(STREAK_WINDOW)
        own = np.nan_to_num(self._worth[rows, rank, phase])
        others = np.nan_to_num(self._worth[rows, :, phase])
        others[:, rank] = 0.0
        leads = own - others.max(axis=1)
        return float(np.median(leads)) if len(leads) else 0.0, _too_often(int((leads > 0).sum()), len(leads))


def _too_often(heads: int, tosses: int) -> bool:
    """True where so many heads of a fair coin have a chance below STREAK_CHANCE."""
    tail = sum(math.comb(tosses, k) for k in range(heads, tosses + 1)) / 2.0**tosses
    return tosses > 0 and tail <= STREAK_CHANCE


class TransferHistory:
    """Past transfers of one group's exchanges; one row per step with the same exchanges."""

    def __init__(self, num_exchanges: int) -> None:
        self._transfer = np.zeros((WINDOW, num_exchanges), dtype=np.int64)
        self._size = np.full((WINDOW, num_exchanges), -1, dtype=np.int64)
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, WINDOW)

    def add(self, transfer_ns: IntArray, size: IntArray) -> None:
        """Keep one step's transfers and the largest payload per exchange (-1 = unknown)."""
        row = self._count % WINDOW
        self._transfer[row], self._size[row] = transfer_ns, size
        self._count += 1

    def expected_ns(self, size: IntArray) -> FloatArray:
        """Median past transfer of each exchange, scaled up where the payload is larger than usual."""
        used = slice(0, len(self))
        expected = np.median(self._transfer[used], axis=0)
        usual_size = np.median(self._size[used], axis=0)
        scale = np.where((usual_size > 0) & (size > usual_size), size / np.maximum(usual_size, 1.0), 1.0)
        scaled: FloatArray = expected * scale
        return scaled

    def spread_ns(self) -> FloatArray:
        """Scaled median absolute deviation of each exchange's past transfers."""
        past = self._transfer[: len(self)]
        deviations: FloatArray = 1.4826 * np.median(np.abs(past - np.median(past, axis=0)), axis=0)
        return deviations

    def within_usual(self, transfer_ns: IntArray, size: IntArray) -> BoolArray:
        """Which transfers are no longer than their own history allows for."""
        expected = self.expected_ns(size)
        usual: BoolArray = transfer_ns <= expected + np.maximum(4.0 * self.spread_ns(), 0.2 * expected)
        return usual
