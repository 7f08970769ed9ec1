"""The drain thread and its emitters: nothing is lost without being counted, and shutdown ends in time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from moetrace.guard import FAILURES_BEFORE_OFF
from moetrace.record.types import StepRecord
from moetrace.testing import FakeDevice, MemoryEmitter
from moetrace_schemas.enums import DropReason

from .conftest import Recording
from .otlp_server import wait_until

Make = Callable[..., Recording]


class StuckEmitter:
    """Takes the first record and never comes back until released."""

    name = "stuck"

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def emit(self, record: StepRecord) -> None:
        """As its class says."""
        self.entered.set()
        self.release.wait(30)

    def close(self, deadline_monotonic_s: float) -> bool:
        """As its class says."""
        return True


class StuckClose(MemoryEmitter):
    """Never finishes closing until released."""

    name = "stuck_close"

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def close(self, deadline_monotonic_s: float) -> bool:
        """As its class says."""
        self.release.wait(30)
        return True


class FailingEmitter:
    """Fails on every record, and on closing."""

    name = "failing"

    def emit(self, record: StepRecord) -> None:
        """As its class says."""
        raise OSError("disk full")

    def close(self, deadline_monotonic_s: float) -> bool:
        """As its class says."""
        raise OSError("disk full")


@pytest.fixture
def stuck() -> Iterator[StuckEmitter]:
    """An emitter that hangs until the test is over."""
    emitter = StuckEmitter()
    yield emitter
    emitter.release.set()


def steps(recording: Recording, count: int) -> None:
    """Record some short steps."""
    for _ in range(count):
        with recording.tracer.step():
            recording.time.advance(1)


def test_shutdown_honours_its_deadline_with_a_stuck_emitter(record: Make, stuck: StuckEmitter) -> None:
    """It returns in time, says that not all was delivered, and counts exactly what was left."""
    recording = record()
    recording.tracer.drain.emitters.insert(0, stuck)
    steps(recording, 4)
    assert stuck.entered.wait(10)
    before = time.monotonic()
    assert recording.tracer.shutdown(timeout_s=0.3) is False
    assert time.monotonic() - before < 1.0
    assert recording.tracer.metrics.dropped == {DropReason.SHUTDOWN_DEADLINE: 4}


def test_a_step_that_was_counted_as_lost_is_not_counted_again(record: Make, stuck: StuckEmitter) -> None:
    """When the stuck emitter comes back and fails, its step has its reason already."""
    recording = record()
    recording.tracer.drain.emitters[:] = [stuck, FailingEmitter()]
    steps(recording, 1)
    assert stuck.entered.wait(10)
    recording.tracer.shutdown(timeout_s=0.1)
    stuck.release.set()
    thread = recording.tracer.drain._thread
    assert thread is not None
    thread.join(10)
    assert recording.tracer.metrics.dropped == {DropReason.SHUTDOWN_DEADLINE: 1}


def test_shutdown_honours_its_deadline_when_closing_hangs(record: Make) -> None:
    """An emitter that does not close in time is left behind, and the others are closed."""
    recording, hanging = record(), StuckClose()
    recording.tracer.drain.emitters.insert(0, hanging)
    steps(recording, 2)
    hanging.wait_for(2)
    before = time.monotonic()
    assert recording.tracer.shutdown(timeout_s=0.3) is False
    assert time.monotonic() - before < 1.0
    hanging.release.set()
    assert len(recording.emitter.records) == 2


def test_shutdown_delivers_what_was_recorded(record: Make) -> None:
    """Steps that wait for the drain thread are emitted before it ends."""
    recording = record(buffers=50)
    steps(recording, 50)
    assert recording.tracer.shutdown(timeout_s=10) is True
    assert [step.step for step in recording.emitter.records] == list(range(50))


def test_an_emitter_that_fails_does_not_keep_others_from_their_records(
    record: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted, logged once, switched off in the end, and each of its steps has a drop reason."""
    recording = record(buffers=64)
    recording.tracer.drain.emitters.insert(0, FailingEmitter())
    count = FAILURES_BEFORE_OFF + 5
    with caplog.at_level(logging.WARNING, "moetrace"):
        steps(recording, count)
        assert recording.tracer.shutdown(timeout_s=10) is False
    assert len(recording.emitter.records) == count
    assert recording.tracer.guard.errors == {"emit.failing": FAILURES_BEFORE_OFF, "close.failing": 1}
    assert recording.tracer.metrics.dropped == {DropReason.EXPORT_FAILED: count}
    assert len([line for line in caplog.messages if "emit.failing" in line]) == 2


def test_a_step_that_cannot_be_assembled_does_not_end_the_thread(
    record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad step is counted as a fault of ours; the next one is emitted."""
    recording = record()
    recording.tracer.wrap(router=lambda: None, layer=0)
    with recording.tracer.step():
        assert recording.tracer.buffer is not None
        recording.tracer.buffer.add(site=99, start=1, end=2)
    steps(recording, 1)
    assert [step.step for step in recording.records()] == [1]
    assert recording.tracer.metrics.dropped == {DropReason.INTERNAL_ERROR: 1}
    assert recording.tracer.guard.errors == {"drain": 1}


def test_buffers_come_back_whatever_happens_to_their_step(record: Make) -> None:
    """Neither faults nor overflow use up the pool."""
    recording = record(buffers=1, max_intervals=16)
    pool = recording.tracer._buffers.ready(None)
    for number in range(6):
        with recording.tracer.step(number):
            assert recording.tracer.buffer is not None
            for _ in range(20 if number % 2 else 1):
                recording.tracer.buffer.add(99, 1, 2)
        wait_until(lambda: len(pool._free) == 1)
    recording.records()
    assert recording.tracer.metrics.dropped == {DropReason.INTERNAL_ERROR: 3, DropReason.BUFFER_FULL: 3}


def test_device_events_are_asked_until_they_are_done(record: Make) -> None:
    """The model thread never waits for the device; the record comes when the device has come that far."""
    device = FakeDevice()
    recording = record(clock=device.clock(), max_intervals=16)
    with recording.tracer.step():
        device.work(5_000_000)
    assert recording.emitter.records == []
    device.finish()
    (step,) = recording.emitter.wait_for(1)
    assert (step.duration_ns, step.clock) == (5_000_000, "cuda")
    assert device.syncs == 0


def test_device_events_that_never_complete_are_given_up_at_shutdown(record: Make) -> None:
    """A hung device does not hang the exit: the step is counted, once."""
    device = FakeDevice()
    recording = record(clock=device.clock(), max_intervals=16)
    with recording.tracer.step():
        device.work(1)
    before = time.monotonic()
    assert recording.tracer.shutdown(timeout_s=0.3) is False
    assert time.monotonic() - before < 1.0
    assert recording.tracer.metrics.dropped.total() == 1
    assert recording.emitter.records == []


def test_a_step_that_ends_inside_a_graph_capture_is_dropped_and_counted(record: Make) -> None:
    """Without a stamp at its end a step has no duration."""
    device = FakeDevice()
    recording = record(clock=device.clock(), max_intervals=16)
    with recording.tracer.step():
        device.capturing = True
    device.capturing = False
    device.finish()
    assert recording.records() == []
    assert recording.tracer.metrics.dropped == {DropReason.EVENTS_UNRESOLVED: 1}
    assert recording.tracer.guard.errors == {}
