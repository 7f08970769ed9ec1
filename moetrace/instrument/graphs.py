"""CUDA graphs: marks that are captured with the work, and replays stamped from outside.

A capture takes the place of the open step: wrapped calls record their marks into the graph, with events
that every replay records again, and count into a counter that the graph owns. A replay inside a
sampled step takes a stamp before and after it, zeroes that counter before and adds it to the step's
behind; all of it is enqueued, and nothing waits. Outside of sampled steps a replay costs one addition.

With `graph_layers=n` only every n-th layer has events of its parts; of the others a graph holds two, the
ends of the layer, which then shows as `fused`.

Neither capture nor replay is the hot path of a wrapped call, and only the begin of a capture may wait,
for the microseconds that the drain thread needs to answer a query.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from moetrace.instrument.patches import Patches, mark_wrapper
from moetrace.record.assembler import STREAM_SHIFT
from moetrace.record.buffer import UNDIVIDED, StepBuffer
from moetrace.record.replays import EMPTY_EVENTS, REPLAY, CapturedGraph, EmptyPair, Replay
from moetrace.record.sites import STEP_LEVEL, Role, Site
from moetrace.timing.capture import CaptureGate

if TYPE_CHECKING:
    from moetrace.timing.cuda_events import Device
    from moetrace.tracer import Tracer

EVENTS_PER_EMPTY = 16
"""A graph measures empty pairs of its own where these are no more than this part of its events."""


class _GraphTrack:
    """Marks are indices of events that become part of the graph."""

    exhausted = stepped_aside = 0

    def __init__(self, device: Device, capacity: int) -> None:
        self._device = device
        self._capacity = capacity
        self.events: list[Any] = []
        self.streams: list[int] = []
        self.mark: Callable[[], int] = self._record

    def _record(self) -> int:
        if len(self.events) >= self._capacity or not self._device.is_capturing():
            return -1
        self.events.append(self._new())
        self.streams.append(self._device.stream())
        return len(self.events) - 1

    def _new(self) -> Any:
        event = self._device.new_graph_event()
        event.record()
        return event

    def empty_pairs(self) -> tuple[Any, ...]:
        """Events with nothing between them, captured now; none where the stream is not captured."""
        if not self._device.is_capturing():
            return ()
        return tuple(self._new() for _ in range(EMPTY_EVENTS))


class _GraphClock:
    """Makes the one track of a capture."""

    name = "cuda"

    def __init__(self, device: Device) -> None:
        self._device = device

    def track(self, capacity: int) -> Any:
        """A track for one capture."""
        return _GraphTrack(self._device, capacity)


class GraphMarks:
    """Wraps capture and replay of one graph class for one tracer."""

    def __init__(self, tracer: Tracer, device: Device, gate: CaptureGate) -> None:
        self._tracer = tracer
        self._device = device
        self._gate = gate
        self._graphs: weakref.WeakKeyDictionary[Any, CapturedGraph] = weakref.WeakKeyDictionary()
        self._set_aside: StepBuffer | None = None
        self._site = tracer.sites.add(REPLAY)
        self._empty = EmptyPair()
        self._measuring = False
        """Whether some graph measures empty pairs."""
        self._pairs: tuple[Any, ...] = ()

    def hook(self, patches: Patches, graph_class: Any) -> None:
        """Wrap the class's capture_begin, capture_end and replay."""
        for name, around in (
            ("capture_begin", self._capture_begin),
            ("capture_end", self._capture_end),
            ("replay", self._replay),
        ):
            patches.replace(graph_class, name, functools.partial(_method, around))

    def _capture_begin(self, function: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        # Before the capture: what is allocated in it would be the graph's.
        prepared: list[StepBuffer] = []
        self._tracer.guard.run("graphs", self._prepare, prepared)
        self._gate.close()
        try:
            result = function(graph, *args, **kwargs)
        except BaseException:
            self._gate.open()
            raise
        self._begin(prepared[0] if prepared else None)
        return result

    def _prepare(self, prepared: list[StepBuffer]) -> None:
        tracer = self._tracer
        if tracer.closed or not self._device.graph_events:
            return
        buffer = StepBuffer(_GraphClock(self._device), tracer.config.max_intervals)
        buffer.counter = tracer.new_counter()
        if buffer.counter is not None:
            # Replays of any step run what is captured now, so checks are in all of them or in none.
            buffer.counter.checking = tracer.config.check_graphs
        buffer.undivided = undivided_sites(tracer.sites.sites, tracer.config.graph_layers)
        prepared.append(buffer)

    def _begin(self, prepared: StepBuffer | None) -> None:
        tracer = self._tracer
        self._set_aside = tracer.buffer
        if tracer.buffer is not None:
            # A step that captures is none that anybody wants in a summary.
            tracer.buffer.warmup = True
        tracer.capture = tracer.buffer = prepared

    def _capture_end(self, function: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        self._tracer.guard.run("graphs", self._measure_empty)
        try:
            return function(graph, *args, **kwargs)
        finally:
            self._gate.open()
            self._tracer.guard.run("graphs", self._end, graph)

    def _measure_empty(self) -> None:
        # In the graph, because events of a graph are other nodes than those of a stream; in large graphs
        # and the first one, so that many small ones do not grow by as much again.
        self._pairs = ()
        track = cast(_GraphTrack, self._tracer.capture.track) if self._tracer.capture is not None else None
        if track is None or not track.events:
            return
        if not self._measuring or len(track.events) >= EVENTS_PER_EMPTY * EMPTY_EVENTS:
            self._measuring = True
            self._pairs = track.empty_pairs()

    def _end(self, graph: Any) -> None:
        tracer = self._tracer
        buffer = tracer.capture
        tracer.capture = None
        tracer.buffer, self._set_aside = self._set_aside, None
        pairs, self._pairs = self._pairs, ()
        if buffer is None:
            return
        if buffer.counter is not None:
            buffer.counter.seal()
        track = cast(_GraphTrack, buffer.track)
        events, order = track.events, list(dict.fromkeys(track.streams))
        intervals = buffer.intervals()
        self._graphs[graph] = CapturedGraph(
            marks=[
                (site, start, end, flags | order.index(track.streams[end]) << STREAM_SHIFT)
                for site, start, end, flags in intervals
                if start >= 0 and end >= 0
            ],
            events=events,
            streams=track.streams,
            inside=frozenset(site for site, start, *_ in intervals if start == UNDIVIDED),
            pairs=pairs,
            empty=self._empty,
            counter=buffer.counter,
        )

    def _replay(self, function: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        captured = self._graphs.get(graph)
        if captured is not None:
            captured.replays += 1
        buffer = self._tracer.buffer
        if buffer is None or buffer is self._tracer.capture:
            return function(graph, *args, **kwargs)
        start: list[int] = []
        self._tracer.guard.run("graphs", self._before, buffer, captured, start)
        result = function(graph, *args, **kwargs)
        if start:
            self._tracer.guard.run("graphs", self._after, buffer, captured, start[0])
        return result

    def _before(self, buffer: StepBuffer, captured: CapturedGraph | None, start: list[int]) -> None:
        start.append(buffer.mark())
        if captured is not None and captured.counter is not None and buffer.counter is not None:
            captured.counter.zero()

    def _after(self, buffer: StepBuffer, captured: CapturedGraph | None, start: int) -> None:
        if captured is not None and captured.counter is not None and buffer.counter is not None:
            buffer.counter.merge(captured.counter)
        number = 0 if captured is None else captured.replays
        buffer.replays.append(
            Replay(
                graph=captured,
                site=self._site,
                number=number,
                start_mark=start,
                end_mark=buffer.mark(),
            )
        )


def _method(around: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    active = True

    @functools.wraps(function)
    def wrapper(graph: Any, *args: Any, **kwargs: Any) -> Any:
        if not active:
            return function(graph, *args, **kwargs)
        return around(function, graph, *args, **kwargs)

    def make_passive() -> None:
        nonlocal active
        active = False

    return mark_wrapper(wrapper, function, make_passive)


def told_apart(sites: Sequence[Site], every: int) -> tuple[int, ...]:
    """Layers whose parts get events in captured graphs.

    Every n-th of those that are wrapped as a whole; all that are not, which would be missing otherwise.
    """
    numbered = [site for site in sites if site.layer is not None and site.layer != STEP_LEVEL]
    layers = {site.layer for site in numbered if site.layer is not None}
    whole = sorted({site.layer for site in numbered if site.layer is not None and site.role is Role.LAYER})
    return tuple(sorted({*whole[::every], *(layers - set(whole))}))


def undivided_sites(sites: Sequence[Site], every: int) -> frozenset[int]:
    """Sites of whole layers that are one call in captured graphs."""
    divided = told_apart(sites, every)
    return frozenset(
        number
        for number, site in enumerate(sites)
        if site.role is Role.LAYER and site.layer not in (None, STEP_LEVEL, *divided)
    )
