"""PyTorch profiler traces (and other Chrome traces) -> RankTrace. Streamed: one event in memory at a time.

Kept are device rows (kernels, copies), runtime calls that carry a correlation, and annotations; operators
and Python frames, most of a file, are counted and dropped as they pass. Events come as X (whole) or as
B and E (begin and end, paired per thread); times as integer or fractional microseconds, counted from
`baseTimeNanoseconds` where the file has one.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moetrace_collectors.model import IntArray
from moetrace_collectors.offline.json_events import EventStream
from moetrace_collectors.offline.rank_trace import (
    MAX_RANKS,
    NO_CORRELATION,
    AnnotationRows,
    CollectiveDetail,
    DeviceKind,
    DeviceRows,
    LaunchRows,
    RankTrace,
)
from moetrace_collectors.offline.source import bad_file, open_bytes
from moetrace_collectors.offline.trace_ranks import rank_in_name

FORMAT = "pytorch_trace"
MAX_MICROSECONDS = 9e15
"""Largest time that fits in 64-bit nanoseconds; about the year 2255."""

DEVICE_CATEGORIES = {
    "kernel": DeviceKind.KERNEL,
    "Kernel": DeviceKind.KERNEL,
    "gpu_memcpy": DeviceKind.MEMCPY,
    "Memcpy": DeviceKind.MEMCPY,
    "gpu_memset": DeviceKind.MEMSET,
    "Memset": DeviceKind.MEMSET,
}
LAUNCH_CATEGORIES = frozenset(
    {"cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "privateuse1_runtime", "runtime", "Runtime"}
)
ANNOTATION_CATEGORIES = frozenset({"user_annotation", "", None})
"""No category at all: a trace that some other tool wrote."""

_DROPPED_CATEGORIES = frozenset(
    {"cpu_op", "python_function", "ac2g", "Operator", "fwdbwd", "cpu_instant_event"}
)

_NUMBERS = re.compile(r"-?\d{1,9}")


class _Times:
    """Growing columns of starts and durations."""

    def __init__(self) -> None:
        self.start, self.duration, self.name = array("q"), array("q"), array("q")

    def add(self, start_ns: int, duration_ns: int, name: int) -> None:
        self.start.append(start_ns)
        self.duration.append(duration_ns)
        self.name.append(name)


class _Builder:
    """Takes events and keeps what matters."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: dict[str, int] = {}
        self.streams: dict[tuple[object, object], int] = {}
        self.threads: dict[tuple[object, object], int] = {}
        self.left_out: Counter[str] = Counter()
        self.device, self.marks = _Times(), _Times()
        self.stream, self.kind = array("q"), array("b")
        self.correlation, self.detail = array("q"), array("q")
        self.launch_correlation, self.launch_start = array("q"), array("q")
        self.launch_thread, self.mark_thread = array("q"), array("q")
        self.details: list[CollectiveDetail] = []
        self._open: dict[tuple[object, object], list[tuple[str, int]]] = {}

    def add(self, index: int, event: Mapping[str, Any]) -> None:
        """One event; what is of no use is counted."""
        category = event.get("cat")
        if not isinstance(category, str) and category is not None:
            category = _text(category)
        if category in _DROPPED_CATEGORIES:
            return  # operators and frames are most of a file
        phase = event.get("ph")
        if phase == "X":
            if category in ANNOTATION_CATEGORIES:
                start = self._time(index, event, "ts")
                duration = self._time(index, event, "dur")
                if start is None or duration is None or duration < 0:
                    self.left_out["no usable time"] += 1
                    return
                self._mark(event, _text(event.get("name")), start, duration)
            elif category in DEVICE_CATEGORIES:
                self._device(index, event, DEVICE_CATEGORIES[category])
            elif category in LAUNCH_CATEGORIES:
                self._launch(index, event)
        elif (phase == "B" or phase == "E") and category in ANNOTATION_CATEGORIES:
            self._begin_or_end(index, event, phase)

    def _device(self, index: int, event: Mapping[str, Any], kind: DeviceKind) -> None:
        start = self._time(index, event, "ts")
        duration = self._time(index, event, "dur")
        if start is None or duration is None or duration < 0:
            self.left_out["no usable time"] += 1
            return
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        self.device.add(start, duration, self._name(_text(event.get("name"))))
        stream = (
            _hashable(args.get("device", event.get("pid"))),
            _hashable(args.get("stream", event.get("tid"))),
        )
        self.stream.append(self.streams.setdefault(stream, len(self.streams)))
        self.kind.append(kind)
        self.correlation.append(_integer(args.get("correlation"), NO_CORRELATION))
        if "Collective name" in args or "Process Group Name" in args:
            self.detail.append(len(self.details))
            self.details.append(_collective(args))
        else:
            self.detail.append(-1)

    def _launch(self, index: int, event: Mapping[str, Any]) -> None:
        args = event.get("args")
        correlation = _integer(args.get("correlation"), NO_CORRELATION) if isinstance(args, dict) else -1
        if correlation < 0:
            return
        start = self._time(index, event, "ts")
        if start is None:
            self.left_out["no usable time"] += 1
            return
        self.launch_correlation.append(correlation)
        self.launch_start.append(start)
        self.launch_thread.append(self._thread(event))

    def _mark(self, event: Mapping[str, Any], name: str, start_ns: int, duration_ns: int) -> None:
        self.marks.add(start_ns, duration_ns, self._name(name))
        self.mark_thread.append(self._thread(event))

    def _begin_or_end(self, index: int, event: Mapping[str, Any], phase: str) -> None:
        time_ns = self._time(index, event, "ts")
        if time_ns is None:
            self.left_out["no usable time"] += 1
            return
        stack = self._open.setdefault((_hashable(event.get("pid")), _hashable(event.get("tid"))), [])
        if phase == "B":
            stack.append((_text(event.get("name")), time_ns))
        elif stack and time_ns >= stack[-1][1]:
            name, start_ns = stack.pop()
            self._mark(event, name, start_ns, time_ns - start_ns)
        else:
            self.left_out["end without begin"] += 1

    def _time(self, index: int, event: Mapping[str, Any], field: str) -> int | None:
        """Nanoseconds; None where there is no number.

        Raises:
            UsageError: a number that no clock shows.
        """
        value = event.get(field)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                return None
        if type(value) is int:
            if -MAX_MICROSECONDS < value < MAX_MICROSECONDS:
                return value * 1000
        elif type(value) is float:
            if -MAX_MICROSECONDS < value < MAX_MICROSECONDS:
                # In two parts: a float holds a time of days to half a nanosecond, its thousandfold does not.
                whole = int(value)
                return whole * 1000 + round((value - whole) * 1000)
        else:
            return None
        raise bad_file(
            self.path, f"event {index}, {field}", f"microseconds below {MAX_MICROSECONDS:.0e} expected"
        )

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def _thread(self, event: Mapping[str, Any]) -> int:
        thread = (_hashable(event.get("pid")), _hashable(event.get("tid")))
        return self.threads.setdefault(thread, len(self.threads))

    def finish(self) -> None:
        """Count what was begun and never ended."""
        begun = sum(len(stack) for stack in self._open.values())
        if begun:
            self.left_out["begin without end"] += begun

    def device_rows(self) -> DeviceRows:
        """In order of start."""
        start = _column(self.device.start)
        order = np.argsort(start, kind="stable")
        return DeviceRows(
            start_ns=start[order],
            duration_ns=_column(self.device.duration)[order],
            name=_column(self.device.name)[order],
            stream=_column(self.stream)[order],
            kind=np.array(self.kind, dtype=np.int64)[order],
            correlation=_column(self.correlation)[order],
            detail=_column(self.detail)[order],
        )

    def launch_rows(self) -> LaunchRows:
        """In order of correlation; of several calls with one correlation the first one counts."""
        correlation, index = np.unique(_column(self.launch_correlation), return_index=True)
        return LaunchRows(
            correlation=correlation,
            start_ns=_column(self.launch_start)[index],
            thread=_column(self.launch_thread)[index],
        )

    def annotation_rows(self) -> AnnotationRows:
        """In order of start."""
        start = _column(self.marks.start)
        order = np.argsort(start, kind="stable")
        return AnnotationRows(
            start_ns=start[order],
            duration_ns=_column(self.marks.duration)[order],
            name=_column(self.marks.name)[order],
            thread=_column(self.mark_thread)[order],
        )


def read_trace(path: Path, *, progress: Callable[[int], None] | None = None) -> RankTrace:
    """The trace in a file; its rank is -1 where neither the file nor its name tells.

    Args:
        path: JSON, plain or gzip.
        progress: Told the bytes (decompressed) as they are read.

    Raises:
        UsageError: not a trace, or a broken one.
    """
    builder = _Builder(path)
    with open_bytes(path) as stream:
        events = EventStream(stream, path, progress=progress)
        for event in events:
            builder.add(events.count - 1, event)
    builder.finish()
    distributed = events.metadata.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    rank = _integer(distributed.get("rank"), -1)
    if not 0 <= rank < MAX_RANKS:
        rank = rank_in_name(path)
    world_size = _integer(distributed.get("world_size"), -1)
    base = _integer(events.metadata.get("baseTimeNanoseconds"), 0)
    device = builder.device_rows()
    annotations = builder.annotation_rows()
    return RankTrace(
        source=str(path),
        format=FORMAT,
        rank=rank,
        rank_told=rank >= 0,
        world_size=world_size if 0 < world_size <= MAX_RANKS else None,
        names=tuple(builder.names),
        device=device,
        launches=builder.launch_rows(),
        annotations=annotations,
        collectives=tuple(builder.details),
        base_unix_ns=base if 0 <= base < 2**62 else 0,
        events=events.count,
        left_out=dict(builder.left_out),
    )


def _collective(args: Mapping[str, Any]) -> CollectiveDetail:
    ranks = args.get("Process Group Ranks", "")
    text = str(ranks) if isinstance(ranks, list | str) else ""
    # A long list is written with an ellipsis, which tells nothing of who is in it.
    members = () if "..." in text else tuple(int(number) for number in _NUMBERS.findall(text)[:MAX_RANKS])
    if any(not 0 <= member < MAX_RANKS for member in members):
        members = ()
    size = _integer(args.get("Group size"), -1)
    return CollectiveDetail(
        name=_text(args.get("Collective name")),
        group=_text(args.get("Process Group Name")),
        group_ranks=members,
        group_size=size if 0 < size <= MAX_RANKS else -1,
        sequence=_integer(args.get("Seq"), -1),
        elements=_integer(args.get("In msg nelems"), -1),
        dtype=_text(args.get("dtype")),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:200]


def _integer(value: object, otherwise: int) -> int:
    """A small whole number, also from text; `otherwise` for anything else."""
    if isinstance(value, str) and value.strip().lstrip("-").isdigit() and len(value) < 20:
        value = int(value)
    if type(value) is int and -(2**62) < value < 2**62:
        return value
    return otherwise


def _hashable(value: object) -> object:
    return value if isinstance(value, int | float | str) or value is None else str(value)[:200]


def _column(values: array[int]) -> IntArray:
    return np.frombuffer(values, dtype=np.int64).copy() if len(values) else np.zeros(0, dtype=np.int64)
