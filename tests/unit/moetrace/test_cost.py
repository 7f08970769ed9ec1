"""What the tracer says of its own cost: calibrated, per step, and on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import moetrace
from moetrace.emit.wire import span_attributes
from moetrace.guard import Guard
from moetrace.instrument.cost import CALLS, interval_cost_ns
from moetrace.instrument.wrap import timed
from moetrace.record.assembler import Assembler
from moetrace.record.buffer import StepBuffer
from moetrace.record.build import build_record
from moetrace.record.sites import Role, Site, SiteTable
from moetrace.testing import MemoryEmitter
from moetrace.timing.clock import HostClock
from moetrace_schemas import attributes
from moetrace_schemas.enums import Phase

from .records import CONTEXT, step_record


class Hand:
    """A clock that stands still until something costs time."""

    def __init__(self) -> None:
        self.now_ns = 0

    def spend(self, duration_ns: int) -> int:
        """Time passes; returns the time."""
        self.now_ns += duration_ns
        return self.now_ns


def test_an_interval_costs_its_two_marks_and_no_more_than_it_takes() -> None:
    """With marks of 300 ns and nothing else that takes time, an interval costs 600 ns."""
    hand = Hand()
    clock = HostClock(lambda: hand.spend(300))
    assert interval_cost_ns(clock, now_ns=lambda: hand.now_ns) == 600.0


def test_a_real_interval_costs_something() -> None:
    """On the real clock it is more than nothing and less than a millisecond."""
    assert 0.0 < interval_cost_ns(HostClock()) < 1_000_000


class Recorder:
    """Records into one buffer."""

    def __init__(self, buffer: StepBuffer) -> None:
        self.buffer: StepBuffer | None = buffer
        self.guard = Guard()

    def record_failed(self, error: BaseException) -> None:
        """Nothing may fail here."""
        raise AssertionError from error


def recorded(calls: int, observe: Callable[..., None] | None, *, cost: float) -> Any:
    """The record of a step with so many calls of one site."""
    sites = SiteTable()
    site = sites.add(Site(Role.PHASE, Phase.ROUTER, 0, "router", alone=True))
    buffer = StepBuffer(HostClock(), CALLS)
    buffer.start_mark = buffer.mark()
    call = timed(lambda: None, Recorder(buffer), site, observe=observe)
    for _ in range(calls):
        call()
    buffer.end_mark = buffer.mark()
    return build_record(buffer, Assembler(sites), "host", Counter(), interval_cost_ns=cost), buffer


def test_a_step_costs_its_intervals_and_the_time_of_counting() -> None:
    """Three intervals of 500 ns, and what the observer of their results really took."""
    record, buffer = recorded(3, lambda *_: None, cost=500.0)
    assert buffer.counting_ns > 0
    assert record.tracer_ns == 1500 + buffer.counting_ns
    plain, _ = recorded(2, None, cost=500.0)
    assert plain.tracer_ns == 1000


def test_counting_time_starts_anew_with_each_step() -> None:
    """A reused buffer does not carry the cost of the step before."""
    _, buffer = recorded(3, lambda *_: None, cost=500.0)
    buffer.begin(6)
    assert buffer.counting_ns == 0


def test_an_uncalibrated_cost_is_not_said() -> None:
    """Not known is not zero: neither in the record nor on the wire."""
    record, _ = recorded(3, None, cost=0.0)
    assert record.tracer_ns == -1
    said = {"sample_period": 1, "model_name": "m", "model_version": ""}
    assert attributes.TRACER_NS not in span_attributes(step_record(), CONTEXT, **said)
    known = span_attributes(step_record(tracer_ns=1234), CONTEXT, **said)
    assert known[attributes.TRACER_NS] == 1234


@pytest.mark.parametrize("steps", [1, 3])
def test_a_tracer_calibrates_itself_and_adds_up_its_steps(steps: int) -> None:
    """Every step says its cost, the counter is their sum, and the drain thread's CPU time is known."""
    emitter = MemoryEmitter()
    tracer = moetrace.init(run_id="cost", clock="host", emitters=[emitter], rank=0, world_size=1)
    router = moetrace.wrap(layer=0, router=lambda tokens: tokens).router
    for _ in range(steps):
        with moetrace.step():
            router([1])
    moetrace.shutdown()
    costs = [record.tracer_ns for record in emitter.records]
    assert len(costs) == steps
    assert all(cost > 0 for cost in costs)
    assert tracer.metrics.model_thread_ns == sum(costs)
    assert tracer.metrics.background_ns["drain"] > 0
