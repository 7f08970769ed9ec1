"""Replays of captured graphs in one step -> calls. Runs in the drain thread, once the device is done.

The events of a captured graph are recorded again by each replay. So times are those of the replay that
the step made only if no other replay was launched before they were read; otherwise the replay shows
as one stretch that cannot be told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from moetrace.record.buffer import TICKET_SHIFT
from moetrace.record.sites import STEP_LEVEL, Role, Site
from moetrace.timing.clock import Track
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import SkipReason

_CAPTURED = int(RowFlag.CAPTURED)
_TICKETS = 1 << 16
"""More exchanges in flight than one graph launches."""
EMPTY_EVENTS = 4
"""Three empty pairs: their median is that of a pair that nothing came in between."""
REPLAY = Site(Role.LAYER, layer=STEP_LEVEL, name="CUDAGraph.replay", per_step=False)
"""A layer of which no part is seen: it shows as `fused`."""


@dataclass(slots=True)
class EmptyPair:
    """What two events of a graph with nothing between them are apart; one for all graphs of a process."""

    ns: int = 0
    """As measured last; 0: not yet, and nothing is subtracted."""


@dataclass(slots=True, eq=False)
class CapturedGraph:
    """What was wrapped when a graph was captured."""

    marks: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(site, start event, end event, flags with ticket and stream above) of each call, events by place."""
    events: list[Any] = field(default_factory=list)
    """In the order of their capture."""
    streams: list[int] = field(default_factory=list)
    """Their streams; those of one stream are reached in this order."""
    inside: frozenset[int] = frozenset()
    """Sites that were called inside layers which the graph records as one call."""
    pairs: tuple[Any, ...] = ()
    """EMPTY_EVENTS further events without work between them, or none."""
    empty: EmptyPair = field(default_factory=EmptyPair)
    replays: int = 0
    """Launched so far; the events hold the times of the last one."""
    counter: Any = None
    """A moetrace.instrument.routing.StepCounter that the graph counts into, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One launch of a graph inside a recorded step."""

    graph: CapturedGraph | None
    """None: captured before anything was wrapped, or without us."""
    site: int
    """Number of the REPLAY site."""
    number: int
    start_mark: int
    end_mark: int


def replayed_calls(
    replays: list[Replay], track: Track, skipped: Counter[SkipReason]
) -> list[tuple[int, int, int, int]]:
    """Calls inside the replays, or the replays themselves where those cannot be told apart.

    Each is (site number, start ns, end ns, flags).
    """
    result: list[tuple[int, int, int, int]] = []
    for number, replay in enumerate(replays, 1):
        if replay.start_mark < 0 or replay.end_mark < 0:
            continue
        inner = _inner(replay, track, number)
        if inner is None:
            skipped[SkipReason.CUDA_GRAPH] += 1
            start, end = track.nanoseconds(replay.start_mark), track.nanoseconds(replay.end_mark)
            result.append((replay.site, start, end, _CAPTURED))
        else:
            result.extend(inner)
    return result


def _inner(replay: Replay, track: Track, number: int) -> list[tuple[int, int, int, int]] | None:
    """Calls of the step's `number`th replay; None where they cannot be told apart."""
    graph = replay.graph
    if graph is None or not graph.marks or graph.replays != replay.number:
        return None
    try:
        times = [track.until(event) for event in graph.events]
        pairs = [track.until(event) for event in graph.pairs]
    except RuntimeError:
        # Being recorded again right now.
        return None
    if graph.replays != replay.number:
        # A launch while they were read.
        return None
    if pairs:
        graph.empty.ns = max(round(median(end - start for start, end in pairwise(pairs))), 0)
    times = without_events(times, graph.streams, graph.empty.ns)
    return [
        (site, times[start], times[end], _flags(flags, number)) for site, start, end, flags in graph.marks
    ]


def without_events(times: Sequence[int], streams: Sequence[int], empty_ns: int) -> list[int]:
    """Times as if events took none: each moves ahead by what those before it on its stream took.

    ::

        events     |A  work  |B|C   work   |D      B and C: nothing between them but B itself
        moved      |A work |BC   work  |D

    So a call is shorter by what its events took, those of calls inside it included, and no gap is left
    between calls that follow each other. Order stays; nothing becomes shorter than zero.
    """
    last: dict[int, tuple[int, int]] = {}
    result = []
    for time, stream in zip(times, streams, strict=True):
        before, moved = last.get(stream, (time, time))
        if stream in last:
            moved += max(time - before - empty_ns, 0)
        last[stream] = time, moved
        result.append(moved)
    return result


def _flags(flags: int, number: int) -> int:
    """Flags of a captured call; tickets of one replay are none of another's, nor of the step's own."""
    has_ticket = flags >> TICKET_SHIFT & (_TICKETS - 1)
    return flags | _CAPTURED | (number * _TICKETS << TICKET_SHIFT if has_ticket else 0)
