"""For tests of code that uses moetrace: an emitter that keeps records, fake clock and fake device events."""

from __future__ import annotations

import threading
from typing import Any

from moetrace.record.placement import PlacementRecord
from moetrace.record.types import StepRecord
from moetrace.timing.cuda_events import CudaClock


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
    """Device time for fake events, with a real device's rules: work has a duration and runs in order.

    Streams share one clock and do not wait for each other. While a graph is captured, work and events become
    part of it, and asking or waiting for any event is an error that breaks the capture.
    """

    def __init__(self) -> None:
        self.enqueued_ns = 0
        """Where the device will be when all enqueued work is done."""
        self.finished_ns = 0
        """How far the device has come."""
        self.host_ns = 0
        self.host_step_ns = 10_000
        """Host time that passes with every look at the host's clock."""
        self.capturing = False
        self.syncs = 0
        self.current_stream = 7
        self.one_queue = False
        self.graph_events = True
        self.graph_event_ns = 0
        """Device time that an event of a graph takes in every replay."""
        self.graph_class: Any = None
        self.captured: list[int | FakeEvent] = []
        """What the graph being captured will do: work in ns, and events to record."""

    def now_ns(self) -> int:
        """The host's clock."""
        self.host_ns += self.host_step_ns
        return self.host_ns

    def clock(self) -> CudaClock:
        """The clock over this device."""
        return CudaClock(self, self.now_ns, self.now_ns)

    def work(self, ns: int) -> None:
        """Enqueue work that takes `ns`."""
        if self.capturing:
            self.captured.append(ns)
        else:
            self.enqueued_ns += ns

    def finish(self) -> None:
        """Let the device catch up."""
        self.finished_ns = self.enqueued_ns

    def replay(self, captured: list[int | FakeEvent]) -> None:
        """Enqueue a captured graph."""
        for item in captured:
            if isinstance(item, FakeEvent):
                item.at_ns = self.enqueued_ns
                self.enqueued_ns += self.graph_event_ns
            else:
                self.enqueued_ns += item

    def new_event(self) -> FakeEvent:
        """An event of this device."""
        return FakeEvent(self)

    def new_graph_event(self) -> FakeEvent:
        """An event that may be captured."""
        return FakeEvent(self, external=True)

    def anchor_event(self) -> FakeEvent:
        """An event on a stream of its own: the device's clock is where its host's is."""
        event = FakeEvent(self)
        event.at_ns = self.finished_ns
        return event

    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.capturing

    def stream(self) -> int:
        """The current stream."""
        return self.current_stream

    def refuse_in_capture(self) -> None:
        """Fail as the driver does.

        Raises:
            RuntimeError: a graph is being captured.
        """
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")


class FakeEvent:
    """Stands in for torch.cuda.Event(enable_timing=True)."""

    def __init__(self, device: FakeDevice, *, external: bool = False) -> None:
        self._device = device
        self._external = external
        self.at_ns: int | None = None

    def record(self) -> None:
        """Record behind all enqueued work; what was recorded before is lost.

        Raises:
            RuntimeError: a graph is being captured, and this is no event for graphs.
        """
        if self._external and self._device.capturing:
            self._device.captured.append(self)
            return
        self._device.refuse_in_capture()
        self.at_ns = self._device.enqueued_ns

    def query(self) -> bool:
        """Whether the device has come this far.

        Raises:
            RuntimeError: a graph is being captured.
        """
        self._device.refuse_in_capture()
        return self.at_ns is not None and self.at_ns <= self._device.finished_ns

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds to `end`.

        Raises:
            RuntimeError: either event has not completed, or a graph is being captured.
        """
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready")
        assert self.at_ns is not None
        assert end.at_ns is not None
        return (end.at_ns - self.at_ns) / 1e6

    def synchronize(self) -> None:
        """Counted: nothing of moetrace may call this."""
        self._device.syncs += 1
        self._device.refuse_in_capture()


class FakeGraph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self._captured: list[int | FakeEvent] = []

    def capture_begin(self) -> None:
        """What runs from here on is captured, and does not run."""
        self.device.captured = []
        self.device.capturing = True

    def capture_end(self) -> None:
        """The graph is complete."""
        self.device.capturing = False
        self._captured = self.device.captured

    def replay(self) -> None:
        """Enqueue it; its events are recorded again."""
        self.device.replay(self._captured)
