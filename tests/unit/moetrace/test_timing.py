"""Clocks: marks now, nanoseconds later, and never a wait for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moetrace.testing import FakeDevice, FakeEvent, FakeTime
from moetrace.timing.clock import HostClock
from moetrace.timing.cuda_events import CudaClock, CudaTrack

from .conftest import Recording
from .intervals import lines

Make = Callable[..., Recording]


@pytest.fixture
def device() -> FakeDevice:
    """A fake device."""
    return FakeDevice()


def cuda_track(device: FakeDevice, capacity: int = 8) -> CudaTrack:
    """A track over a fake device."""
    return CudaClock(device.new_event, device.is_capturing).track(capacity)


def test_a_host_mark_is_the_time_itself() -> None:
    """It is ready at once, and nothing has to be forgotten."""
    time = FakeTime()
    track = HostClock(time.now_ns).track(2)
    first = track.mark()
    time.advance(30)
    second = track.mark()
    assert track.ready()
    assert track.nanoseconds(second) - track.nanoseconds(first) == 30
    track.reset()
    assert track.nanoseconds(first) == first


def test_device_marks_resolve_to_the_device_time_between_them(device: FakeDevice) -> None:
    """Ns from the track's first mark, by the device's own clock."""
    device.work(777)
    track = cuda_track(device)
    marks = [track.mark()]
    for work in (1_000, 2_500_000, 0):
        device.work(work)
        marks.append(track.mark())
    device.finish()
    assert [track.nanoseconds(mark) for mark in marks] == [0, 1_000, 2_501_000, 2_501_000]


def test_a_track_is_ready_once_every_event_has_completed(device: FakeDevice) -> None:
    """Not before, and asking does not wait."""
    track = cuda_track(device)
    assert track.ready()
    track.mark()
    device.work(10)
    track.mark()
    assert not track.ready()
    device.finish()
    assert track.ready()


def test_nothing_is_ever_synchronised(device: FakeDevice) -> None:
    """Marks, queries, elapsed times and reset: the device is never waited for."""
    track = cuda_track(device)
    for _ in range(3):
        device.work(5)
        track.mark()
    track.ready()
    device.finish()
    assert track.ready()
    assert track.nanoseconds(2) == 10
    track.reset()
    assert device.syncs == 0


def test_events_are_created_once_and_used_again(device: FakeDevice) -> None:
    """A track holds as many events as it may need, from the start."""
    made = []
    clock = CudaClock(lambda: made.append(device.new_event()) or made[-1], device.is_capturing)  # type: ignore[func-returns-value]
    track = clock.track(3)
    assert len(made) == 3
    for _ in range(4):
        assert [track.mark(), track.mark(), track.mark()] == [0, 1, 2]
        track.reset()
    assert len(made) == 3


def test_an_exhausted_track_gives_no_stamp_and_counts(device: FakeDevice) -> None:
    """Beyond its events a mark is -1; the ones before stay readable."""
    track = cuda_track(device, 2)
    assert [track.mark() for _ in range(4)] == [0, 1, -1, -1]
    assert track.exhausted == 2
    device.finish()
    assert track.nanoseconds(1) == 0
    track.reset()
    assert (track.mark(), track.exhausted) == (0, 0)


def test_while_a_graph_is_captured_a_mark_gives_no_stamp(device: FakeDevice) -> None:
    """An event in a captured graph could not be read: none is touched, and none is used up."""
    recorded = []

    class Event(FakeEvent):
        def record(self) -> None:
            recorded.append(device.capturing)

    track = CudaClock(lambda: Event(device), device.is_capturing).track(4)
    assert track.mark() == 0
    device.capturing = True
    assert track.mark() == -1
    device.capturing = False
    assert track.mark() == 1
    assert recorded == [False, False]


def test_a_device_that_refuses_an_event_gives_no_stamp(device: FakeDevice) -> None:
    """A capture that was not announced, or a device in error: the model must not see it."""
    track = CudaClock(device.new_event, lambda: False).track(4)
    device.capturing = True
    assert track.mark() == -1


def test_a_step_with_a_capture_inside_survives(record: Make, device: FakeDevice) -> None:
    """What was captured is missing, what was not is timed, and the missing calls are counted."""
    recording = record(clock=CudaClock(device.new_event, device.is_capturing), max_intervals=16)

    def part() -> None:
        device.work(1_000)

    wrapped = recording.tracer.wrap(router=part, experts=part, combine=part, layer=0)
    with recording.tracer.step():
        wrapped.router()
        device.capturing = True
        wrapped.experts()
        device.capturing = False
        wrapped.combine()
    device.finish()
    (step,) = recording.records()
    assert lines(step.phases) == ["0 router 0-1000", "0 permute 1000-2000", "0 combine 2000-3000 barrier"]
    assert recording.tracer.metrics.dropped_intervals == 1
    assert len(step.seen_sites) == 2
    assert device.syncs == 0


def test_a_call_that_captures_a_graph_is_left_out_as_a_whole(record: Make, device: FakeDevice) -> None:
    """Its start has a stamp and its end has none: half a call is no interval."""
    recording = record(clock=CudaClock(device.new_event, device.is_capturing), max_intervals=16)

    def capture() -> None:
        device.capturing = True

    wrapped = recording.tracer.wrap(router=capture, layer=0)
    with recording.tracer.step():
        wrapped.router()
        device.capturing = False
        device.work(500)
    device.finish()
    (step,) = recording.records()
    assert lines(step.phases) == ["-1 outside 0-500"]
