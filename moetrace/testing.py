"""For tests of code that uses moetrace: an emitter that keeps records, fake clock and fake device events."""

from __future__ import annotations

import threading

from moetrace.record.placement import PlacementRecord
from moetrace.record.types import StepRecord


class MemoryEmitter:
    """Keeps every record."""

    name = "memory"

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.placements: list[PlacementRecord] = []
        self._arrived = threading.Condition()

    def emit(self, record: StepRecord) -> None:
        """Keep one record."""
        with self._arrived:
            self.records.append(record)
            self._arrived.notify_all()

    def emit_placement(self, record: PlacementRecord) -> None:
        """Keep one placement."""
        self.placements.append(record)

    def wait_for(self, count: int, timeout_s: float = 10.0) -> list[StepRecord]:
        """The first `count` records, once they are there.

        Raises:
            TimeoutError: they did not come in time; the message says how many did.
        """
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self.records) >= count, timeout_s):
                raise TimeoutError(f"{len(self.records)} of {count} records after {timeout_s} s")
            return self.records[:count]

    def close(self, deadline_monotonic_s: float) -> bool:
        """Nothing is queued."""
        return True


class FakeTime:
    """A host clock that moves only when told: `HostClock(FakeTime().now_ns)`."""

    def __init__(self) -> None:
        self.ns = 1_000

    def now_ns(self) -> int:
        """The time, ns."""
        return self.ns

    def advance(self, ns: int) -> None:
        """Let time pass."""
        self.ns += ns


class FakeDevice:
    """Device time for fake events: work is enqueued with a duration and runs in order."""

    def __init__(self) -> None:
        self.enqueued_ns = 0
        """Where the device will be when all enqueued work is done."""
        self.finished_ns = 0
        """How far the device has come."""
        self.capturing = False
        self.syncs = 0

    def work(self, ns: int) -> None:
        """Enqueue work that takes `ns`."""
        self.enqueued_ns += ns

    def finish(self) -> None:
        """Let the device catch up."""
        self.finished_ns = self.enqueued_ns

    def new_event(self) -> FakeEvent:
        """An event of this device."""
        return FakeEvent(self)

    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.capturing


class FakeEvent:
    """Stands in for torch.cuda.Event(enable_timing=True)."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.at_ns: int | None = None

    def record(self) -> None:
        """Record behind all enqueued work.

        Raises:
            RuntimeError: a graph is being captured, as on a real device.
        """
        if self._device.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.at_ns = self._device.enqueued_ns

    def query(self) -> bool:
        """Whether the device has come this far."""
        return self.at_ns is not None and self.at_ns <= self._device.finished_ns

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds to `end`.

        Raises:
            RuntimeError: either event has not completed, as on a real device.
        """
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready")
        assert self.at_ns is not None
        assert end.at_ns is not None
        return (end.at_ns - self.at_ns) / 1e6

    def synchronize(self) -> None:
        """Counted: nothing of moetrace may call this."""
        self._device.syncs += 1
