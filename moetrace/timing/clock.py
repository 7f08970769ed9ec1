"""One protocol for host and device time.

A clock hands out marks (opaque integers) on the hot path and turns them into nanoseconds later, in
the drain thread. Marks of one `Track` are comparable with each other, and only with each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Track(Protocol):
    """Marks of one step. Reused for later steps after `reset`."""

    mark: Callable[[], int]
    """Take a stamp now. Never raises, never waits; -1 when no stamp could be taken."""

    def ready(self) -> bool:
        """Whether every mark can be resolved now. Never waits."""
        ...

    def nanoseconds(self, mark: int) -> int:
        """A mark as ns on this track's time line; call only when `ready`."""
        ...

    def reset(self) -> None:
        """Forget all marks, so that the track can serve another step."""
        ...


class Clock(Protocol):
    """Makes tracks. `name` is what the wire calls it."""

    name: str

    def track(self, capacity: int) -> Track:
        """A track that can hold `capacity` marks."""
        ...


class HostTrack:
    """Marks are perf_counter ns already."""

    mark: Callable[[], int]

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.mark = now_ns

    def ready(self) -> bool:
        """Always: a host stamp is a number from the start."""
        return True

    def nanoseconds(self, mark: int) -> int:
        """The mark itself."""
        return mark

    def reset(self) -> None:
        """Nothing to forget."""


class HostClock:
    """Monotonic host time: right where the work is synchronous with the host (CPU devices)."""

    name = "host"

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns

    def track(self, capacity: int) -> HostTrack:
        """A track over this clock; capacity is not needed."""
        return HostTrack(self._now_ns)
