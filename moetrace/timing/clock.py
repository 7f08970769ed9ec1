"""One protocol for host and device time.

A clock hands out marks (opaque integers) on the hot path and turns them into nanoseconds later, in
the drain thread. Marks of one `Track` are comparable with each other, and only with each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from moetrace.timing.anchor import Placed

T = TypeVar("T")


class Track(Protocol):
    """Marks of one step. Reused for later steps after `reset`."""

    mark: Callable[[], int]
    """Take a stamp now. Never raises, never waits; -1 when no stamp could be taken."""

    def ready(self) -> bool:
        """Whether every mark can be resolved now. Never waits."""
        ...

    exhausted: int
    """Marks that could not be taken for want of events."""
    stepped_aside: int
    """Marks that were not taken because they would have held the device up."""

    def resolve(self, function: Callable[[], T]) -> T | None:
        """What `function` returns; None, without a call, while nothing may be asked of the device."""
        ...

    def nanoseconds(self, mark: int) -> int:
        """A mark as ns on this track's time line; call only within `resolve`, when `ready`."""
        ...

    def until(self, event: Any) -> int:
        """Ns on this track's time line of a device event that is not of this track."""
        ...

    def stream(self, mark: int) -> int:
        """The stream of a mark: 0 for that of the first mark, others by order of their first use."""
        ...

    def placed(self) -> Placed | None:
        """Unix time of the first mark, where the clock knows better than the host did."""
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
    exhausted = stepped_aside = 0

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.mark = now_ns

    def ready(self) -> bool:
        """Always: a host stamp is a number from the start."""
        return True

    def resolve(self, function: Callable[[], T]) -> T | None:
        """At once."""
        return function()

    def nanoseconds(self, mark: int) -> int:
        """The mark itself."""
        return mark

    def until(self, event: Any) -> int:
        """Never asked: a host clock has no device events."""
        raise NotImplementedError

    def stream(self, mark: int) -> int:
        """The host has one."""
        return 0

    def placed(self) -> Placed | None:
        """The host's own stamp is as good."""
        return None

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
