"""Device time from pooled CUDA events: recorded now, resolved later, never waited for.

Each track owns a fixed list of timing events, created once. A mark records the next event on the
current stream and returns its index; the drain thread asks `query()` and reads elapsed times from
the track's first event.

Marks that follow each other on one stream faster than the host could have launched anything in between
share an event.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from moetrace.timing.anchor import Anchors, Placed
from moetrace.timing.capture import CaptureGate

logger = logging.getLogger("moetrace")
T = TypeVar("T")

SHARE_WITHIN_NS = 1_500
"""No torch call launches a kernel in less host time than this."""


class DeviceEvent(Protocol):
    """What is used of torch.cuda.Event; tests pass fakes."""

    def record(self) -> None:
        """Record on the current stream."""
        ...

    def query(self) -> bool:
        """Whether the event has completed."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`, an event of the same kind."""
        ...


class Device(Protocol):
    """What is used of a device; `moetrace.testing.FakeDevice` is one without hardware."""

    one_queue: bool
    """Whether an event on another stream could make streams wait for each other."""
    graph_events: bool
    """Whether events can become part of a captured graph."""
    graph_class: Any
    """What captures graphs, with capture_begin, capture_end and replay; None where there is none."""

    def new_event(self) -> DeviceEvent:
        """A timing event."""
        ...

    def new_graph_event(self) -> DeviceEvent:
        """A timing event that may be recorded while a graph is captured, and is recorded by each replay."""
        ...

    def anchor_event(self) -> DeviceEvent:
        """A timing event, recorded now on a stream that holds nothing else."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        ...

    def stream(self) -> int:
        """The current stream's id."""
        ...


class CudaTrack:
    """Marks are indices into this track's events."""

    mark: Callable[[], int]

    def __init__(
        self,
        events: list[DeviceEvent],
        device: Device,
        gate: CaptureGate,
        now_ns: Callable[[], int],
        anchors: Anchors,
    ) -> None:
        self._events = events
        self._device = device
        self._gate = gate
        self._now_ns = now_ns
        self._anchors = anchors
        self._streams = [0] * len(events)
        self._order: dict[int, int] = {}
        self._used = 0
        self._last_ns = -SHARE_WITHIN_NS
        self.exhausted = 0
        self.stepped_aside = 0
        """Marks on other streams that were left out because streams share one queue."""
        self.mark = self._record

    def _record(self) -> int:
        index = self._used
        try:
            # A timing event recorded while a graph is captured can neither be read nor be replayed.
            if self._device.is_capturing():
                return -1
            stream = self._device.stream()
            if index:
                if self._device.one_queue and stream != self._streams[0]:
                    self.stepped_aside += 1
                    return -1
                now = self._now_ns()
                if now - self._last_ns < SHARE_WITHIN_NS and stream == self._streams[index - 1]:
                    return index - 1
            if index >= len(self._events):
                self.exhausted += 1
                return -1
            self._events[index].record()
        except RuntimeError:
            return -1
        self._streams[index] = stream
        self._used = index + 1
        self._last_ns = self._now_ns()
        return index

    def ready(self) -> bool:
        """Whether every recorded event has completed, whatever stream it was recorded on."""
        return bool(self._gate.run(self._all_done))

    def _all_done(self) -> bool:
        # The last mark is the likeliest to be unfinished: ask it first, and all only once it is done.
        used = self._events[: self._used]
        return all(event.query() for event in reversed(used))

    def resolve(self, function: Callable[[], T]) -> T | None:
        """What `function` returns; None, without a call, while a graph is captured."""
        return self._gate.run(function)

    def nanoseconds(self, mark: int) -> int:
        """Ns from the track's first mark."""
        if mark == 0:
            return 0
        return self.until(self._events[mark])

    def until(self, event: Any) -> int:
        """Ns from the track's first mark to an event that is not of this track."""
        return round(self._events[0].elapsed_time(event) * 1e6)

    def stream(self, mark: int) -> int:
        """The stream of a mark by order of its first use in this step: 0 is that of the first mark."""
        if not self._order:
            self._order = {stream: at for at, stream in enumerate(dict.fromkeys(self._streams[: self._used]))}
        return self._order[self._streams[mark]]

    def placed(self) -> Placed | None:
        """Unix time of the first mark."""
        self._anchors.renew()
        return self._anchors.place(self._events[0])

    def reset(self) -> None:
        """Make all events available again."""
        self._used = 0
        self._order.clear()
        self._last_ns = -SHARE_WITHIN_NS
        self.exhausted = self.stepped_aside = 0


class CudaDevice:
    """The current CUDA device; also ROCm, where torch offers it under the same name."""

    def __init__(self) -> None:
        import torch

        self._cuda = cast(Any, torch.cuda)
        self.graph_class: Any = torch.cuda.CUDAGraph
        self._index = torch.cuda.current_device()
        self.is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        # With one hardware queue an event of a communication stream makes compute wait for it.
        self.one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        self.graph_events = torch.version.hip is None and self._has_graph_events()
        self.stream: Callable[[], int] = _stream_id(torch, self._index)
        self._own: Any = None

    def _has_graph_events(self) -> bool:
        try:
            self.new_graph_event()
        except TypeError as error:
            logger.warning(
                "moetrace: this torch has no events for captured graphs (%s): what they replay is one "
                "stretch of time, its phases are not told apart",
                error,
            )
            return False
        return True

    def new_event(self) -> DeviceEvent:
        """A timing event."""
        event: DeviceEvent = self._cuda.Event(enable_timing=True)
        return event

    def new_graph_event(self) -> DeviceEvent:
        """A timing event for captured graphs."""
        event: DeviceEvent = self._cuda.Event(enable_timing=True, external=True)
        return event

    def anchor_event(self) -> DeviceEvent:
        """A timing event, recorded now on a stream of its own."""
        if self._own is None:
            self._own = self._cuda.Stream(device=self._index)
        event: Any = self._cuda.Event(enable_timing=True)
        event.record(self._own)
        kept: DeviceEvent = event
        return kept


def _stream_id(torch: Any, device: int) -> Callable[[], int]:
    """Asks for the current stream's id: without the object around it, where torch has that."""
    current = getattr(torch._C, "_cuda_getCurrentStream", None)
    if current is None:
        return lambda: int(torch.cuda.current_stream(device).stream_id)
    return lambda: cast(int, current(device)[0])


class CudaClock:
    """CUDA timing events."""

    name = "cuda"

    def __init__(
        self,
        device: Device | None = None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.device: Device = CudaDevice() if device is None else device
        self.gate = CaptureGate()
        self._now_ns = now_ns
        self._anchors = Anchors(self.device.anchor_event, unix_ns)

    def track(self, capacity: int) -> CudaTrack:
        """A track with `capacity` events; creating them is the only slow part and happens here."""
        events = [self.device.new_event() for _ in range(capacity)]
        return CudaTrack(events, self.device, self.gate, self._now_ns, self._anchors)
