"""Unions, differences and the innermost of intervals, against a picture drawn nanosecond by nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moetrace_collectors.model import IntArray
from moetrace_collectors.offline.intervals import Innermost, innermost_by_thread, length, subtract, union

SOME = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def arrays(spans: list[tuple[int, int]]) -> tuple[IntArray, IntArray]:
    """(start, length) pairs as starts and ends."""
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    return starts, starts + np.array([size for _, size in spans], dtype=np.int64)


def drawn(spans: list[tuple[int, int]]) -> set[int]:
    """Every nanosecond that is covered."""
    return {moment for start, size in spans for moment in range(start, start + size)}


@given(SOME)
def test_union_covers_each_moment_once(spans: list[tuple[int, int]]) -> None:
    """Disjoint, ascending, and the same time as drawn."""
    starts, ends = union(*arrays(spans))
    assert (starts[1:] > ends[:-1]).all()
    assert length(starts, ends) == len(drawn(spans))


@given(SOME, SOME)
def test_difference_is_what_is_drawn(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    """What the one covers and the other does not."""
    starts, ends = subtract(*arrays(spans), *arrays(others))
    found = {m for start, end in zip(starts.tolist(), ends.tolist(), strict=True) for m in range(start, end)}
    assert found == drawn(spans) - drawn(others)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12), st.integers(0, 90))
def test_innermost_started_last(spans: list[tuple[int, int]], moment: int) -> None:
    """Of the intervals that hold a moment, the one that started last, then the one that ends first."""
    starts, ends = arrays(spans)
    holding = [i for i in range(len(spans)) if starts[i] <= moment < ends[i]]
    found = int(Innermost(starts, ends).at(np.array([moment], dtype=np.int64))[0])
    if not holding:
        assert found == -1
    else:
        best = max(holding, key=lambda i: (starts[i], -ends[i]))
        assert (starts[found], ends[found]) == (starts[best], ends[best])


def test_own_thread_comes_before_others() -> None:
    """A launch inside an annotation of its own thread is its; one inside none of its own takes any other's.

    ::

        thread 1   |------ a ------|
        thread 2      |-- b --|
        launches      1 at 5: a     3 at 5: b (innermost of all)     2 at 12: a
    """
    starts, ends = np.array([0, 3]), np.array([20, 10])
    found = innermost_by_thread(
        starts, ends, np.array([1, 2]), moments=np.array([5, 5, 12]), at_threads=np.array([1, 3, 2])
    )
    assert found.tolist() == [0, 1, 0]
