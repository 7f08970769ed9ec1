"""The bounded buffers between the model thread and the drain thread."""

from __future__ import annotations

import pytest

from moetrace.record.buffer import BufferPool, StepBuffer
from moetrace.testing import FakeTime
from moetrace.timing.clock import HostClock


def make_buffer(max_intervals: int = 4) -> StepBuffer:
    """A buffer on a fake clock."""
    return StepBuffer(HostClock(FakeTime().now_ns), max_intervals)


def test_intervals_are_kept_as_recorded() -> None:
    """Site, marks and flags come back as they were added, in order of their end."""
    buffer = make_buffer()
    buffer.add(3, 10, 20)
    buffer.add(1, 5, 30, 8)
    assert buffer.intervals() == [(3, 10, 20, 0), (1, 5, 30, 8)]


def test_beyond_the_capacity_intervals_are_counted_and_nothing_is_overwritten() -> None:
    """A full buffer keeps what it has and says how much it could not keep."""
    buffer = make_buffer(2)
    for number in range(5):
        buffer.add(number, number, number)
    assert buffer.intervals() == [(0, 0, 0, 0), (1, 1, 1, 0)]
    assert buffer.overflow == 3


def test_a_new_step_starts_empty() -> None:
    """Nothing of the step before is left in a reused buffer."""
    buffer = make_buffer(1)
    buffer.add(1, 1, 1)
    buffer.add(1, 1, 1)
    buffer.launch(99)
    buffer.traffic.append((0, "dispatch", 8, [1]))
    buffer.local_rows.append((0, 1))
    buffer.begin(7)
    assert buffer.intervals() == []
    assert (buffer.step, buffer.overflow, buffer.launches, buffer.in_flight) == (7, 0, 0, {})
    assert (buffer.traffic, buffer.local_rows, buffer.start_mark, buffer.end_mark) == ([], [], -1, -1)


def test_a_wait_gets_the_ticket_of_the_exchange_it_names() -> None:
    """Exchanges in flight together are told apart by their handles, in whatever order they land."""
    buffer = make_buffer()
    first, second = buffer.launch(11), buffer.launch(22)
    assert buffer.landed((22,), guess=True) == second
    assert buffer.landed((11,), guess=True) == first
    assert not buffer.in_flight


def test_a_wait_for_something_unknown_ends_the_oldest_exchange_when_it_may_guess() -> None:
    """A view of a pending result has another name than the result."""
    buffer = make_buffer()
    first = buffer.launch(11)
    buffer.launch(22)
    assert buffer.landed((77, 78), guess=False) == 0
    assert buffer.landed((77, 78), guess=True) == first


def test_one_wait_inside_another_does_not_end_a_second_exchange() -> None:
    """A wait may reach another wrapped wait for the same result: that one lands nothing more."""
    buffer = make_buffer()
    first = buffer.launch(11)
    buffer.launch(22)
    assert buffer.landed((77, 78), guess=True) == first
    assert buffer.landed((78, 78), guess=True) == 0
    assert list(buffer.in_flight) == [22]


def test_work_objects_are_never_guessed() -> None:
    """A Work object (handle below 0) is waited for under its own name only."""
    buffer = make_buffer()
    ticket = buffer.launch(-11)
    assert buffer.landed((77,), guess=True) == 0
    assert buffer.landed((-11,), guess=False) == ticket


def test_a_pool_hands_out_each_buffer_once_until_it_is_released() -> None:
    """An empty pool says so at once; a released buffer can be had again."""
    pool = BufferPool(HostClock(FakeTime().now_ns), 2, 4)
    first, second = pool.acquire(), pool.acquire()
    assert first is not None
    assert second is not None
    assert first is not second
    assert pool.acquire() is None
    pool.release(first)
    assert pool.acquire() is first


def test_buffers_of_a_pool_are_numbered() -> None:
    """Counters are prepared per buffer, and found by its number."""
    pool = BufferPool(HostClock(FakeTime().now_ns), 3, 4)
    assert [buffer.number for buffer in pool.all_buffers] == [0, 1, 2]


@pytest.mark.parametrize("how", ["hand_over", "release"])
def test_a_step_that_is_over_keeps_nothing_of_its_exchanges(how: str) -> None:
    """What an exchange in flight would be counted by holds its tensors: let go when the step ends."""
    pool = BufferPool(HostClock(), 1, 4)
    buffer = pool.acquire()
    assert buffer is not None
    buffer.arrivals[-1] = lambda result: None
    getattr(pool, how)(buffer)
    assert not buffer.arrivals
