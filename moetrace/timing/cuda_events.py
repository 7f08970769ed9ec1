"""Device time from pooled CUDA events: recorded now, resolved later, never waited for.

Each track owns a fixed list of timing events, created once. A mark records the next event on the
current stream and returns its index; the drain thread asks `query()` and reads elapsed times from
the track's first event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast


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


class CudaTrack:
    """Marks are indices into this track's events."""

    mark: Callable[[], int]

    def __init__(self, events: list[DeviceEvent], is_capturing: Callable[[], bool]) -> None:
        self._events = events
        self._is_capturing = is_capturing
        self._used = 0
        self.exhausted = 0
        self.mark = self._record

    def _record(self) -> int:
        index = self._used
        if index >= len(self._events):
            self.exhausted += 1
            return -1
        try:
            # A timing event recorded while a graph is captured can neither be read nor be replayed.
            if self._is_capturing():
                return -1
            self._events[index].record()
        except RuntimeError:
            return -1
        self._used = index + 1
        return index

    def ready(self) -> bool:
        """Whether every recorded event has completed, whatever stream it was recorded on."""
        # The last mark is the likeliest to be unfinished: ask it first, and all only once it is done.
        used = self._events[: self._used]
        return all(event.query() for event in reversed(used))

    def nanoseconds(self, mark: int) -> int:
        """Ns from the track's first mark."""
        if mark == 0:
            return 0
        return round(self._events[0].elapsed_time(self._events[mark]) * 1e6)

    def reset(self) -> None:
        """Make all events available again."""
        self._used = 0
        self.exhausted = 0


class CudaClock:
    """CUDA timing events; also ROCm, where torch offers them under the same name."""

    name = "cuda"

    def __init__(
        self,
        new_event: Callable[[], DeviceEvent] | None = None,
        is_capturing: Callable[[], bool] | None = None,
    ) -> None:
        if new_event is None or is_capturing is None:
            import torch

            def cuda_event() -> DeviceEvent:
                event: DeviceEvent = cast(Any, torch.cuda.Event)(enable_timing=True)
                return event

            new_event = new_event or cuda_event
            is_capturing = is_capturing or torch.cuda.is_current_stream_capturing
        self._new_event = new_event
        self._is_capturing = is_capturing

    def track(self, capacity: int) -> CudaTrack:
        """A track with `capacity` events; creating them is the only slow part and happens here."""
        return CudaTrack([self._new_event() for _ in range(capacity)], self._is_capturing)
