"""Unions and coverage of intervals, and the innermost of nested ones. Pure, int64 nanoseconds throughout.

::

    a        |=====|   |===|
    b           |=====|
    union    |========||===|        subtract(a, b)   |==|   |===|
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from moetrace_collectors.model import IntArray

NONE = -1


def union(starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """The union of intervals [start, end) as disjoint intervals in ascending order; empty ones vanish."""
    some = ends > starts
    starts, ends = starts[some], ends[some]
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    new = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([np.flatnonzero(new)[1:] - 1, [len(ends) - 1]])
    return starts[new], ends[last]


def length(starts: IntArray, ends: IntArray) -> int:
    """Time that at least one of the intervals covers."""
    starts, ends = union(starts, ends)
    return int((ends - starts).sum())


def subtract(
    starts: IntArray, ends: IntArray, other_starts: IntArray, other_ends: IntArray
) -> tuple[IntArray, IntArray]:
    """What the union of the first intervals covers and the union of the others does not."""
    starts, ends = union(starts, ends)
    other_starts, other_ends = union(other_starts, other_ends)
    if not len(starts) or not len(other_starts):
        return starts, ends
    # Between two neighbouring edges nothing changes; the time belongs to the result where exactly the
    # first set is open.
    edges = np.concatenate([starts, ends, other_starts, other_ends])
    first = np.concatenate(
        [np.ones(len(starts)), -np.ones(len(ends)), np.zeros(len(other_starts) + len(other_ends))]
    )
    other = np.concatenate(
        [np.zeros(len(starts) + len(ends)), np.ones(len(other_starts)), -np.ones(len(other_ends))]
    )
    order = np.argsort(edges, kind="stable")
    edges = edges[order]
    open_first, open_other = np.cumsum(first[order]), np.cumsum(other[order])
    kept = (open_first[:-1] > 0) & (open_other[:-1] == 0)
    return union(edges[:-1][kept], edges[1:][kept])


class Innermost:
    """Which of many, possibly nested or overlapping, intervals is the innermost at a moment.

    The innermost one is the one that started last; of those that started together, the one that ends
    first. An interval holds its start and not its end.
    """

    def __init__(self, starts: IntArray, ends: IntArray) -> None:
        """Index the intervals; answers are positions in these arrays."""
        edges = np.unique(np.concatenate([starts, ends]))
        owners = np.full(len(edges), NONE, dtype=np.int64)
        order = np.lexsort((-ends, starts)).tolist()
        # The interval on top of the heap is the innermost; one that has ended is dropped when it
        # comes up, which is soon enough, because only the top matters.
        open_ones: list[tuple[int, int, int]] = []
        begin, finish = starts.tolist(), ends.tolist()
        following = 0
        for position, edge in enumerate(edges.tolist()):
            while following < len(order) and begin[order[following]] <= edge:
                index = order[following]
                heappush(open_ones, (-begin[index], finish[index], index))
                following += 1
            while open_ones and open_ones[0][1] <= edge:
                heappop(open_ones)
            if open_ones:
                owners[position] = open_ones[0][2]
        self._edges, self._owners = edges, owners

    def at(self, moments: IntArray) -> IntArray:
        """Index of the innermost interval at each moment; -1 where there is none."""
        if not len(self._edges):
            return np.full(len(moments), NONE, dtype=np.int64)
        position = np.searchsorted(self._edges, moments, side="right") - 1
        found: IntArray = np.where(position >= 0, self._owners[np.maximum(position, 0)], NONE)
        return found


def innermost_by_thread(
    starts: IntArray, ends: IntArray, threads: IntArray, moments: IntArray, at_threads: IntArray
) -> IntArray:
    """The innermost interval of the moment's own thread; of any thread where its own has none.

    Autograd launches the backward of an annotated forward from a thread of its own, so a launch may lie
    inside no annotation of its thread and yet inside one of another.
    """
    if not len(starts):
        return np.full(len(moments), NONE, dtype=np.int64)
    found = np.full(len(moments), NONE, dtype=np.int64)
    for thread in np.unique(at_threads).tolist():
        own: npt.NDArray[np.int64] = np.flatnonzero(threads == thread)
        if len(own):
            here = np.flatnonzero(at_threads == thread)
            inner = Innermost(starts[own], ends[own]).at(moments[here])
            found[here] = np.where(inner >= 0, own[np.maximum(inner, 0)], NONE)
    missing = np.flatnonzero(found == NONE)
    if len(missing):
        found[missing] = Innermost(starts, ends).at(moments[missing])
    return found
