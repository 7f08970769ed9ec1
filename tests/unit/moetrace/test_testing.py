"""What users' tests are given: it behaves as the real thing does."""

from __future__ import annotations

import threading

import pytest

from moetrace.testing import FakeDevice, FakeGraph, FakeTime, MemoryEmitter

from .records import step_record


def test_a_memory_emitter_waits_for_records_of_another_thread() -> None:
    """A test needs no sleep."""
    emitter = MemoryEmitter()
    threading.Thread(target=lambda: emitter.emit(step_record(7))).start()
    assert [record.step for record in emitter.wait_for(1)] == [7]


def test_a_memory_emitter_says_how_many_came_in_time() -> None:
    """A failing test should say what it got."""
    emitter = MemoryEmitter()
    emitter.emit(step_record())
    with pytest.raises(TimeoutError, match=r"1 of 2 records after 0\.01 s"):
        emitter.wait_for(2, timeout_s=0.01)


def test_fake_time_moves_only_when_told() -> None:
    """The same moment twice, then another one."""
    time = FakeTime()
    first = time.now_ns()
    assert time.now_ns() == first
    time.advance(5)
    assert time.now_ns() == first + 5


def test_a_fake_event_completes_when_the_device_comes_that_far() -> None:
    """As on a real device, elapsed time before that is an error."""
    device = FakeDevice()
    start, end = device.new_event(), device.new_event()
    assert not start.query()
    start.record()
    device.work(2_000_000)
    end.record()
    with pytest.raises(RuntimeError, match="not ready"):
        start.elapsed_time(end)
    device.finish()
    assert start.elapsed_time(end) == 2.0


def test_a_fake_event_refuses_to_be_recorded_in_a_capture() -> None:
    """As a real one does; and a sync is counted."""
    device = FakeDevice()
    device.capturing = True
    for refused in ("record", "query", "synchronize"):
        with pytest.raises(RuntimeError, match="capturing"):
            getattr(device.new_event(), refused)()
    assert device.syncs == 1


def test_an_event_for_graphs_is_recorded_by_each_replay() -> None:
    """Capturing it runs nothing; and what was recorded before is lost, as on a real device."""
    device = FakeDevice()
    graph, event, start = FakeGraph(device), device.new_graph_event(), device.new_event()
    start.record()
    graph.capture_begin()
    device.work(1_000_000)
    event.record()
    graph.capture_end()
    assert (event.at_ns, device.enqueued_ns) == (None, 0)
    for milliseconds in (1.0, 2.0):
        graph.replay()
        device.finish()
        assert start.elapsed_time(event) == milliseconds
