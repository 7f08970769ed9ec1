"""How far each rank has come, by what it has sent: who is past a step will not send it any more. Pure.

With `num_steps` = 3, a rank that has sent these steps is past step 5 and all before it, and not yet past 6::

    sent        4   .   6   7   9
    mark                6            the third highest that it has sent

The steps are counted and not their numbers, so sampling one step in ten changes nothing. Only the order in
which one rank's own steps come matters; how far ranks are apart does not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict

MAX_RANKS = 2**18
"""Ranks over all runs. Beyond it the run heard of least recently is forgotten, and its steps wait longer."""
NONE = -1
"""The mark of a rank that has sent too little."""


class Watermarks:
    """The mark of every rank. Not thread-safe: the joiner owns it."""

    def __init__(self, *, num_steps: int, max_ranks: int = MAX_RANKS) -> None:
        """Start with nothing heard.

        Args:
            num_steps: so many steps after a step say that a rank is past it; 0 = it never is.
            max_ranks: ranks remembered.
        """
        self._num_steps = num_steps
        self._max_ranks = max_ranks
        self._num_ranks = 0
        self._newest: OrderedDict[str, dict[int, list[int]]] = OrderedDict()
        """Per run and rank the highest steps that it has sent, ascending, `num_steps` at most."""

    def mark(self, run_id: str, rank: int) -> int:
        """A rank is past every step below its mark."""
        newest = self._newest.get(run_id, {}).get(rank, ())
        return newest[0] if newest and len(newest) == self._num_steps else NONE

    def saw(self, run_id: str, rank: int, step: int) -> bool:
        """A rank has sent a step; whether its mark has risen."""
        if not self._num_steps:
            return False
        ranks = self._newest.get(run_id)
        if ranks is None:
            ranks = self._newest[run_id] = {}
        self._newest.move_to_end(run_id)
        newest = ranks.get(rank)
        if newest is None:
            newest = ranks[rank] = []
            self._num_ranks += 1
            self._forget(run_id)
        place = bisect_left(newest, step)
        if place < len(newest) and newest[place] == step:
            return False
        if len(newest) < self._num_steps:
            insort(newest, step)
            return len(newest) == self._num_steps
        if place == 0:
            return False
        newest.insert(place, step)
        del newest[0]
        return True

    def _forget(self, kept: str) -> None:
        while self._num_ranks > self._max_ranks:
            oldest = next(iter(self._newest))
            if oldest == kept:
                return
            self._num_ranks -= len(self._newest.pop(oldest))
