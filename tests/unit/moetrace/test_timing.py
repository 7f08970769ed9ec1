"""Clocks: marks now, nanoseconds later, and never a wait for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moetrace.testing import FakeDevice, FakeEvent, FakeTime
from moetrace.timing.anchor import GIVE_UP_AFTER_NS, Anchors
from moetrace.timing.clock import HostClock
from moetrace.timing.cuda_events import CudaTrack
from moetrace_schemas.enums import DropReason, SkipReason

from .conftest import Recording
from .intervals import lines

Make = Callable[..., Recording]


@pytest.fixture
def device() -> FakeDevice:
    """A fake device."""
    return FakeDevice()


def cuda_track(device: FakeDevice, capacity: int = 8) -> CudaTrack:
    """A track over a fake device."""
    return device.clock().track(capacity)


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

    class Counting(FakeDevice):
        def new_event(self) -> FakeEvent:
            made.append(super().new_event())
            return made[-1]

    track = Counting().clock().track(3)
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

    device.new_event = lambda: Event(device)  # type: ignore[method-assign]
    track = device.clock().track(4)
    assert track.mark() == 0
    device.capturing = True
    assert track.mark() == -1
    device.capturing = False
    assert track.mark() == 1
    assert recorded == [False, False]


def test_a_device_that_refuses_an_event_gives_no_stamp(device: FakeDevice) -> None:
    """A capture that was not announced, or a device in error: the model must not see it."""
    device.is_capturing = lambda: False  # type: ignore[method-assign]
    track = device.clock().track(4)
    device.capturing = True
    assert track.mark() == -1


def test_a_step_with_a_capture_inside_survives(record: Make, device: FakeDevice) -> None:
    """What was captured is missing, what was not is timed, and the missing calls are counted."""
    recording = record(clock=device.clock(), max_intervals=16)

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
    assert lines(step.phases) == ["0 router 0-1000", "0 combine 1000-2000 barrier"]
    assert recording.tracer.metrics.dropped_intervals == 1
    assert len(step.seen_sites) == 2
    assert device.syncs == 0


def test_a_call_that_captures_a_graph_is_left_out_as_a_whole(record: Make, device: FakeDevice) -> None:
    """Its start has a stamp and its end has none: half a call is no interval."""
    recording = record(clock=device.clock(), max_intervals=16)

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


def test_marks_that_no_launch_can_lie_between_share_an_event(device: FakeDevice) -> None:
    """The end of a phase and the begin of the next are one stamp; one later or elsewhere is its own."""
    device.host_step_ns = 400
    track = cuda_track(device)
    assert [track.mark(), track.mark(), track.mark()] == [0, 0, 0]
    device.host_ns += 5_000
    assert [track.mark(), track.mark()] == [1, 1]
    device.current_stream = 8
    assert track.mark() == 2


def test_a_step_that_needs_more_events_than_its_pool_holds_is_dropped_with_its_reason(
    record: Make, device: FakeDevice
) -> None:
    """Half a step is no step: the reason is counted."""
    recording = record(clock=device.clock(), max_intervals=16)
    with recording.tracer.step():
        for _ in range(40):
            recording.tracer.buffer.mark()  # type: ignore[union-attr]
    device.finish()
    assert recording.records() == []
    assert recording.tracer.metrics.dropped == {DropReason.EVENT_POOL_EMPTY: 1}


def test_rows_of_another_stream_lie_beside_the_steps_own(record: Make, device: FakeDevice) -> None:
    """A shared expert on its own stream overlaps the experts; the step's own stream still tiles the step."""
    recording = record(clock=device.clock(), max_intervals=16)

    def shared() -> None:
        device.work(2_000)

    def experts() -> None:
        device.current_stream = 9
        wrapped.shared_expert()
        device.current_stream = 7
        device.work(1_000)

    wrapped = recording.tracer.wrap(experts=experts, shared_expert=shared, layer=0)
    with recording.tracer.step():
        wrapped.experts()
    device.finish()
    (step,) = recording.records()
    rows = [(row.stream, line) for row, line in zip(step.phases, lines(step.phases), strict=True)]
    assert rows == [(0, "0 expert_gemm 0-3000"), (1, "0 shared_expert 0-2000")]


def test_with_one_queue_no_event_is_recorded_on_other_streams(record: Make, device: FakeDevice) -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1: a call on another stream is left out and counted, the rest is timed."""
    device.one_queue = True
    recording = record(clock=device.clock(), max_intervals=16)
    wrapped = recording.tracer.wrap(
        router=lambda: device.work(100), shared_expert=lambda: device.work(50), layer=0
    )
    with recording.tracer.step():
        wrapped.router()
        device.current_stream = 9
        wrapped.shared_expert()
        device.current_stream = 7
    device.finish()
    (step,) = recording.records()
    assert lines(step.phases) == ["0 router 0-100", "-1 outside 100-150"]
    assert recording.tracer.metrics.skipped == {SkipReason.ONE_QUEUE: 2}
    assert recording.tracer.metrics.dropped_intervals == 1


def test_a_step_is_placed_in_unix_time_from_an_anchor(device: FakeDevice) -> None:
    """The device reaches the step later than the host enqueued it; the error is half the look's width."""
    device.host_step_ns = 10
    device.host_ns = 1_000_000
    track = cuda_track(device)
    device.work(5_000)
    track.mark()
    device.finish()
    device.finished_ns = 2_000
    anchors = track._anchors
    anchors.renew()
    device.finish()
    assert anchors.latest is not None
    placed = track.placed()
    assert placed is not None
    assert placed.unix_ns == anchors.latest.unix_ns + 3_000
    assert placed.error_ns == anchors.latest.error_ns == 10


def test_anchors_are_renewed_and_give_the_drift_between_the_clocks() -> None:
    """A device clock that gains 100 ppm is seen to, and a step between anchors is placed accordingly."""
    host = FakeTime()

    class Event:
        def __init__(self) -> None:
            self.device_ns = host.ns * 1.0001

        def query(self) -> bool:
            host.advance(100)
            return True

        def elapsed_time(self, end: Event) -> float:
            return (end.device_ns - self.device_ns) / 1e6

    anchors = Anchors(Event, host.now_ns)
    anchors.renew()
    first = anchors.latest
    anchors.renew()
    assert anchors.latest is first
    host.advance(10_000_000_000)
    anchors.renew()
    assert anchors.latest is not first
    assert anchors.drift_ppm == pytest.approx(100, abs=0.1)
    host.advance(1_000_000_000)
    event = Event()
    placed = anchors.place(event)
    assert placed is not None
    assert abs(placed.unix_ns - host.ns) <= placed.error_ns + 1


def test_a_device_that_is_full_keeps_its_last_anchor() -> None:
    """The wait for an anchor is bounded; without any, a step keeps the host's stamp."""
    host = FakeTime()

    class Event:
        def query(self) -> bool:
            host.advance(100_000)
            return False

    anchors = Anchors(Event, host.now_ns)
    anchors.renew()
    assert anchors.latest is None
    assert anchors.place(Event()) is None
    assert host.ns < 3 * GIVE_UP_AFTER_NS
