"""A strict reader of the Trace Event Format: what Perfetto would drop is an AssertionError.

Stricter than the format where Perfetto's importer is: events come in order of time, slices of one track nest,
and each arrow has one beginning and one end, in this order, each inside a slice of its track.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Track = tuple[int, int]
REQUIRED = {
    "M": {"pid", "name", "args"},
    "X": {"pid", "tid", "name", "cat", "ts", "dur", "args"},
    "C": {"pid", "name", "ts", "args"},
    "s": {"pid", "tid", "name", "cat", "ts", "id"},
    "f": {"pid", "tid", "name", "cat", "ts", "id", "bp"},
}
NAMES = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """A flow, with the slices that it is bound to."""

    source: Event
    target: Event


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A trace that is as it should be."""

    slices: list[Event] = field(default_factory=list)
    counters: list[Event] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    tracks: dict[Track, str] = field(default_factory=dict)

    def of(self, category: str, process: int) -> list[Event]:
        """Slices of one category and process, in order of time."""
        return [one for one in self.slices if (one["cat"], one["pid"]) == (category, process)]


def read_trace(path: Path) -> Trace:
    """Read and check a file; compressed where its name ends with .gz."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    return checked(document["traceEvents"])


def checked(events: list[Event]) -> Trace:
    """Check a list of events."""
    trace = Trace()
    last = 0.0
    ends: dict[Any, dict[str, Event]] = defaultdict(dict)
    for event in events:
        kind = event["ph"]
        assert REQUIRED[kind] <= set(event), event
        assert set(event) <= REQUIRED[kind] | {"ph", "tid"}, event
        assert all(type(event[key]) is int for key in ("pid", "tid") if key in event), event
        if kind == "M":
            _name(event, trace)
            continue
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= last, ("not in order of time", event)
        last = event["ts"]
        if kind == "X":
            assert event["dur"] >= 0, event
            trace.slices.append(event)
        elif kind == "C":
            assert event["args"], event
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
            trace.counters.append(event)
        else:
            assert kind not in ends[event["cat"], event["id"]], ("an id is used twice", event)
            assert kind == "s" or event["bp"] == "e", event
            ends[event["cat"], event["id"]][kind] = event
    _check_nesting(trace.slices)
    for shared, pair in ends.items():
        assert set(pair) == {"s", "f"}, ("an arrow without both ends", shared)
        assert pair["s"]["ts"] <= pair["f"]["ts"], ("an arrow back in time", shared)
        assert pair["s"]["name"] == pair["f"]["name"]
    trace.arrows.extend(_bind(ends.values(), trace.slices))
    used = {event["pid"] for event in (*trace.slices, *trace.counters)}
    assert used <= set(trace.processes), "a process without a name"
    assert {(one["pid"], one["tid"]) for one in trace.slices} <= set(trace.tracks), "a track without a name"
    return trace


def _name(event: Event, trace: Trace) -> None:
    assert event["name"] in NAMES, event
    if event["name"] == "process_name":
        assert event["pid"] not in trace.processes, ("named twice", event)
        trace.processes[event["pid"]] = event["args"]["name"]
    elif event["name"] == "thread_name":
        track = (event["pid"], event["tid"])
        assert track not in trace.tracks, ("named twice", event)
        trace.tracks[track] = event["args"]["name"]


def _ns(microseconds: float) -> int:
    nanoseconds = round(microseconds * 1000)
    assert abs(nanoseconds - microseconds * 1000) < 0.01, "finer than a nanosecond"
    return nanoseconds


def _check_nesting(slices: list[Event]) -> None:
    open_ends: dict[Track, list[int]] = defaultdict(list)
    for one in slices:
        start, end = _ns(one["ts"]), _ns(one["ts"]) + _ns(one["dur"])
        stack = open_ends[one["pid"], one["tid"]]
        while stack and stack[-1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1], ("slices of one track overlap", one)
        stack.append(end)


def _bind(pairs: Iterable[dict[str, Event]], slices: list[Event]) -> list[Arrow]:
    by_track: dict[Track, list[Event]] = defaultdict(list)
    for one in slices:
        by_track[one["pid"], one["tid"]].append(one)

    def enclosing(end: Event) -> Event:
        time = _ns(end["ts"])
        found = [
            one
            for one in by_track[end["pid"], end["tid"]]
            if _ns(one["ts"]) <= time < _ns(one["ts"]) + _ns(one["dur"])
        ]
        assert found, ("an arrow's end in no slice", end)
        return found[-1]

    return [Arrow(source=enclosing(pair["s"]), target=enclosing(pair["f"])) for pair in pairs]


def names_of(slices: list[Event]) -> Counter[str]:
    """How often each name occurs."""
    return Counter(one["name"] for one in slices)
