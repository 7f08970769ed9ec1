"""CUDA graphs: marks that are captured with the work, and replays stamped from outside.

A capture takes the place of the open step: wrapped calls record their marks into the graph, with events
that every replay records again, and count into a counter that the graph owns. A replay inside a
sampled step takes a stamp before and after it, zeroes that counter before and adds it to the step's
behind; all of it is enqueued, and nothing waits. Outside of sampled steps a replay costs one addition.

Neither capture nor replay is the hot path of a wrapped call, and only the begin of a capture may wait,
for the microseconds that the drain thread needs to answer a query.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from moetrace.instrument.patches import Patches, mark_wrapper
from moetrace.record.assembler import STREAM_SHIFT
from moetrace.record.buffer import StepBuffer
from moetrace.record.replays import REPLAY, CapturedGraph, Replay
from moetrace.timing.capture import CaptureGate

if TYPE_CHECKING:
    from moetrace.timing.cuda_events import Device
    from moetrace.tracer import Tracer


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
        event = self._device.new_graph_event()
        event.record()
        self.events.append(event)
        self.streams.append(self._device.stream())
        return len(self.events) - 1


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
        prepared.append(buffer)

    def _begin(self, prepared: StepBuffer | None) -> None:
        tracer = self._tracer
        self._set_aside = tracer.buffer
        if tracer.buffer is not None:
            # A step that captures is none that anybody wants in a summary.
            tracer.buffer.warmup = True
        tracer.capture = tracer.buffer = prepared

    def _capture_end(self, function: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(graph, *args, **kwargs)
        finally:
            self._gate.open()
            self._tracer.guard.run("graphs", self._end, graph)

    def _end(self, graph: Any) -> None:
        tracer = self._tracer
        buffer = tracer.capture
        tracer.capture = None
        tracer.buffer, self._set_aside = self._set_aside, None
        if buffer is None:
            return
        track = cast(_GraphTrack, buffer.track)
        events, order = track.events, list(dict.fromkeys(track.streams))
        marks = [
            (site, events[start], events[end], flags | order.index(track.streams[end]) << STREAM_SHIFT)
            for site, start, end, flags in buffer.intervals()
            if start >= 0 and end >= 0
        ]
        self._graphs[graph] = CapturedGraph(marks=marks, counter=buffer.counter)

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
