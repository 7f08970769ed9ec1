"""Exposed time: what a row adds to its rank's own timeline when streams overlap.

Part of the first stage of the verdict. Time that two streams of one rank share is counted once, for the
stream with the lower number (0 is the compute stream), and never added up::

    stream 0   |== expert_gemm 6 ==|          |= 2 =|
    stream 1        |<-- dispatch 9 ------->|
    exposed                        |<- 5 -->|          dispatch counts 9 - 4 = 5
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moetrace_collectors.model import IntArray, PhaseColumns


def exposed_durations(rows: PhaseColumns) -> IntArray:
    """Duration of each row minus what rows of lower-numbered streams cover of it, ns."""
    if not rows.stream.any():
        return rows.duration_ns
    exposed = rows.duration_ns.copy()
    starts, ends = rows.start_offset_ns, rows.start_offset_ns + rows.duration_ns
    streams = np.unique(rows.stream)
    covered = rows.stream == streams[0]
    for stream in streams[1:]:
        here = rows.stream == stream
        union_starts, union_ends = _union(starts[covered], ends[covered])
        exposed[here] -= _coverage(union_starts, union_ends, ends[here]) - _coverage(
            union_starts, union_ends, starts[here]
        )
        covered |= here
    return exposed


def exposed_durations_of(ranks: Sequence[PhaseColumns]) -> IntArray:
    """The same of M ranks with as many rows each: [M, n]."""
    stream = ranks[0].stream
    # Mostly one array that the decoder has found in all of them (phase_shapes).
    if all(rows.stream is stream for rows in ranks) and not stream.any():
        return np.stack([rows.duration_ns for rows in ranks])
    return np.stack([exposed_durations(rows) for rows in ranks])


def _union(starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """The union of intervals as disjoint intervals in ascending order."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    new = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([np.flatnonzero(new)[1:] - 1, [len(ends) - 1]])
    return starts[new], ends[last]


def _coverage(starts: IntArray, ends: IntArray, at: IntArray) -> IntArray:
    """How much of (-inf, t] disjoint ascending intervals cover, for each t of `at`."""
    lengths = ends - starts
    before = np.concatenate([[0], np.cumsum(lengths)])
    index = np.searchsorted(starts, at, side="right")
    inside = np.where(index > 0, np.minimum(at - starts[index - 1], lengths[index - 1]), 0)
    covered: IntArray = before[np.maximum(index - 1, 0)] + inside
    return covered
