"""Traces without a device: what the program annotated on its threads, as rows of the same shape. Pure.

A CPU run has no kernels, so its annotations are the only intervals there are. Each known one becomes
rows for the time that no other known one inside it has, and a collective's own mark takes its time from
whatever encloses it, on any thread (gloo runs them on threads of its own)::

    main thread      |==== dispatch =========|= expert_gemm =|
    gloo thread         |= gloo:all_to_all =|
    rows             |d|= exchange =========||= expert_gemm =|
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moetrace_collectors.model import IntArray
from moetrace_collectors.offline.annotation_names import COMMUNICATION
from moetrace_collectors.offline.intervals import Innermost, subtract
from moetrace_collectors.offline.phases import known_annotations
from moetrace_collectors.offline.rank_trace import DeviceKind, DeviceRows, LaunchRows, RankTrace


def with_host_rows(trace: RankTrace) -> RankTrace:
    """The trace with its known annotations as rows, where it has no device rows; else as it is."""
    if len(trace.device) or not len(trace.annotations):
        return trace
    marks = trace.annotations
    is_communication = np.array([COMMUNICATION.match(name) is not None for name in trace.names])
    communication = np.flatnonzero(is_communication[marks.name])
    parts: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    ends = marks.start_ns + marks.duration_ns
    if len(communication):
        parts.append(
            (
                marks.start_ns[communication],
                ends[communication],
                marks.name[communication],
                marks.thread[communication],
            )
        )
    known = known_annotations(trace)
    for thread in np.unique(marks.thread[known]).tolist():
        own = known[marks.thread[known] == thread]
        owners = Innermost(marks.start_ns[own], ends[own])
        edges = np.unique(np.concatenate([marks.start_ns[own], ends[own]]))
        inner = owners.at(edges[:-1])
        for position in np.unique(inner[inner >= 0]).tolist():
            mine = np.flatnonzero(inner == position)
            starts, stops = subtract(
                edges[:-1][mine], edges[1:][mine], marks.start_ns[communication], ends[communication]
            )
            name = np.full(len(starts), marks.name[own[position]], dtype=np.int64)
            parts.append((starts, stops, name, np.full(len(starts), thread, dtype=np.int64)))
    if not parts:
        return trace
    starts, stops, names, threads = (np.concatenate([part[i] for part in parts]) for i in range(4))
    order = np.argsort(starts, kind="stable")
    rows = np.arange(len(order), dtype=np.int64)
    streams = {thread: index for index, thread in enumerate(dict.fromkeys(threads[order].tolist()))}
    return replace(
        trace,
        device=DeviceRows(
            start_ns=starts[order],
            duration_ns=(stops - starts)[order],
            name=names[order],
            stream=np.array([streams[thread] for thread in threads[order].tolist()], dtype=np.int64),
            kind=np.full(len(order), DeviceKind.KERNEL, dtype=np.int64),
            correlation=rows,
            detail=np.full(len(order), -1, dtype=np.int64),
        ),
        launches=LaunchRows(correlation=rows, start_ns=starts[order], thread=threads[order]),
    )
