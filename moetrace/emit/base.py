"""The seam to what leaves the process."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from moetrace.record.placement import PlacementRecord
from moetrace.record.types import StepRecord


class Emitter(Protocol):
    """Takes finished records; called by the drain thread only."""

    name: str

    def emit(self, record: StepRecord) -> None:
        """Take one record. Must not wait for anything remote; may drop, and then counts it."""
        ...

    def close(self, deadline_monotonic_s: float) -> bool:
        """Deliver what is queued until the deadline (time.monotonic seconds); True when nothing was lost."""
        ...


@runtime_checkable
class PlacementEmitter(Protocol):
    """An emitter that also takes placements; called by the drain thread, before the first step under one."""

    def emit_placement(self, record: PlacementRecord) -> None:
        """Take one placement. Must not wait for anything remote, and keeps it until it is delivered."""
        ...
