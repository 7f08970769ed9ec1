"""Chrome trace events, as Perfetto and chrome://tracing open them: one constructor each, and the file.

Times go in as integer nanoseconds and out as microseconds with three decimals, so that none is rounded.
Events are written in order of time. An arrow binds to the slices that enclose its two ends, so of events
at one time slices come first, the longest before those inside it.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Event = dict[str, Any]
"""One trace event; built here only."""
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_ORDER = {"M": 0, "X": 1, "C": 2, "s": 3, "f": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Where an arrow may begin or end."""

    process: int
    track: int
    start_ns: int
    duration_ns: int


def process_names(process: int, name: str, *, sort_index: int) -> Iterator[Event]:
    """Name and place of a process."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": sort_index}}


def track_names(process: int, track: int, name: str, *, sort_index: int) -> Iterator[Event]:
    """Name and place of a track inside its process."""
    place = {"ph": "M", "pid": process, "tid": track}
    yield {**place, "name": "thread_name", "args": {"name": name}}
    yield {**place, "name": "thread_sort_index", "args": {"sort_index": sort_index}}


def slice_event(where: Slice, name: str, category: str, arguments: Mapping[str, Any]) -> Event:
    """A stretch of a track."""
    return {
        "ph": "X",
        "pid": where.process,
        "tid": where.track,
        "name": name,
        "cat": category,
        "ts": _us(where.start_ns),
        "dur": _us(where.duration_ns),
        "args": dict(arguments),
    }


def counter(process: int, name: str, time_ns: int, value: float) -> Event:
    """A value from this time on."""
    return {"ph": "C", "pid": process, "name": name, "ts": _us(time_ns), "args": {"value": value}}


def arrow(number: int, name: str, source: Slice, target: Slice) -> tuple[Event, ...]:
    """From the beginning of one slice to the beginning of another, or as early after it as can be bound.

    Clocks of ranks are aligned to within an error only, and an arrow must not point back in time: then it
    ends later inside `target`. Nothing where `target` is over before `source` begins, or a slice is empty.

    Args:
        number: Unique among the arrows of the trace.
        name: For people.
        source: Of whom is waited for.
        target: Of who waited.
    """
    begin = source.start_ns
    end = max(target.start_ns, begin)
    if not source.duration_ns or end >= target.start_ns + target.duration_ns:
        return ()
    shared = {"cat": "release", "name": name, "id": number}
    return (
        {"ph": "s", "pid": source.process, "tid": source.track, "ts": _us(begin), **shared},
        {"ph": "f", "bp": "e", "pid": target.process, "tid": target.track, "ts": _us(end), **shared},
    )


def write_events(events: Iterable[Event], out: IO[str]) -> int:
    """Write a trace in order of time; returns the number of events."""
    ordered = sorted(events, key=_place)
    out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    for index, event in enumerate(ordered):
        out.write(f"{',' if index else ''}{_ENCODER.encode(event)}\n")
    out.write("]}\n")
    return len(ordered)


@contextmanager
def open_trace(path: Path, *, named: Path) -> Iterator[IO[str]]:
    """Open `path` to write a trace into, compressed where the final name `named` ends with .gz."""
    if named.suffix != ".gz":
        with path.open("w", encoding="utf-8") as out:
            yield out
        return
    # Neither name nor time in the header: the same trace is the same file.
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8") as out,
    ):
        yield out


def _place(event: Event) -> tuple[float, int, float]:
    return (event.get("ts", -1.0), _ORDER[event["ph"]], -event.get("dur", 0.0))


def _us(time_ns: int) -> float:
    return round(time_ns / 1000, 3)
