"""Steps: which are recorded, what they say, and what happens to those that are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moetrace.adapters.reference import ReferenceMoE
from moetrace.guard import FAILURES_BEFORE_OFF
from moetrace.record.types import StepRecord
from moetrace.testing import FakeTime
from moetrace.timing.clock import HostClock
from moetrace_schemas.enums import CountKind, DropReason, ForwardMode, Phase
from moetrace_schemas.identity import HIGHEST_STEP, is_sampled

from .conftest import Recording

Make = Callable[..., Recording]


class Model(nn.Module):
    """One MoE layer; forward takes an attention mask as language models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = ReferenceMoE(8, 16, num_experts=4, top_k=2)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """The mask is not used: it is there to be seen."""
        return self.mlp(hidden)


def numbers(records: list[StepRecord]) -> list[int]:
    """Their step numbers."""
    return [record.step for record in records]


def accounted(recording: Recording) -> bool:
    """Every sampled step was emitted or dropped for a reason."""
    metrics = recording.tracer.metrics
    return metrics.steps_sampled == len(recording.emitter.records) + metrics.dropped.total()


# --- which steps ---------------------------------------------------------------------------------


def test_every_rank_samples_the_same_steps(record: Make) -> None:
    """No rank talks to another: run id and step number decide alone."""
    ranks = [record(rank=rank, world_size=3, sample="1/4", buffers=100) for rank in range(3)]
    for recording in ranks:
        for step in range(80):
            with recording.tracer.step(step):
                recording.time.advance(1)
    sampled = [numbers(recording.records()) for recording in ranks]
    assert sampled[0] == sampled[1] == sampled[2]
    assert sampled[0] == [step for step in range(80) if is_sampled("test-run", step, 4)]
    assert 5 < len(sampled[0]) < 40


def test_steps_count_up_from_the_last_one(record: Make) -> None:
    """Without a number a step is the one after the last, also after one that said its number."""
    recording = record(buffers=16)
    for step in (None, None, 10, None):
        with recording.tracer.step(step):
            pass
    assert numbers(recording.records()) == [0, 1, 10, 11]


def test_steps_that_are_not_sampled_advance_the_count(record: Make) -> None:
    """Sampling leaves holes; it does not renumber."""
    recording = record(sample="1/3", buffers=32)
    for _ in range(30):
        with recording.tracer.step():
            pass
    assert numbers(recording.records()) == [step for step in range(30) if is_sampled("test-run", step, 3)]
    metrics = recording.tracer.metrics
    assert (metrics.steps_sampled, metrics.steps_not_sampled) == (
        len(recording.emitter.records),
        30 - len(recording.emitter.records),
    )


def test_a_forward_outside_a_step_is_a_step_of_its_own(record: Make) -> None:
    """Serving code that knows nothing of steps is recorded forward by forward."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    for _ in range(3):
        model(torch.randn(2, 8))
    records = recording.records()
    assert numbers(records) == [0, 1, 2]
    assert [sum(row.counts) for step in records for row in step.experts] == [4, 4, 4]


def test_forwards_inside_a_step_belong_to_it(record: Make) -> None:
    """Microbatches or several models: one step, counted together."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    with recording.tracer.step(7):
        model(torch.randn(2, 8))
        model(torch.randn(3, 8))
    (step,) = recording.records()
    assert step.step == 7
    assert [sum(row.counts) for row in step.experts] == [10]


def test_a_forward_inside_a_step_that_is_not_sampled_is_not_recorded(record: Make) -> None:
    """It is part of its step, and not one of its own."""
    recording, model = record(sample="0"), Model()
    recording.tracer.instrument(model)
    with recording.tracer.step():
        model(torch.randn(2, 8))
    assert recording.records() == []
    assert recording.tracer.metrics.steps_not_sampled == 1


def test_of_nested_steps_the_inner_one_is_recorded(record: Make) -> None:
    """The outer one is dropped and counted, and what follows the inner one belongs to no step."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    with recording.tracer.step(1):
        with recording.tracer.step(2):
            model(torch.randn(2, 8))
        model(torch.randn(2, 8))
    model(torch.randn(2, 8))
    assert numbers(recording.records()) == [2, 3]
    assert recording.tracer.metrics.dropped == {DropReason.STEP_ABORTED: 1}
    assert accounted(recording)


def test_steps_that_interlock_end_with_their_own_scope(record: Make) -> None:
    """Leaving a step that was replaced does not end the one in its place."""
    recording = record()
    first, second = recording.tracer.step(1), recording.tracer.step(2)
    first.__enter__()
    second.__enter__()
    recording.time.advance(10)
    first.__exit__(None, None, None)
    recording.time.advance(10)
    second.__exit__(None, None, None)
    (step,) = recording.records()
    assert (step.step, step.duration_ns) == (2, 20)


# --- what a step says ----------------------------------------------------------------------------


def test_a_step_says_what_it_is_for(record: Make) -> None:
    """Forward mode, microbatch, warm-up and cohort are as given."""
    recording = record(cohorts=("code",))
    with recording.tracer.step(3, forward_mode="decode", microbatch=2, cohort="code", warmup=True):
        recording.time.advance(5)
    (step,) = recording.records()
    assert (step.step, step.forward_mode, step.microbatch) == (3, ForwardMode.DECODE, 2)
    assert (step.cohort, step.warmup, step.duration_ns) == ("code", True, 5)


def test_forward_mode_defaults_to_the_configured_one(record: Make) -> None:
    """Prefill and decode are never mixed up with training by default."""
    recording = record(forward_mode="prefill")
    with recording.tracer.step():
        pass
    assert recording.records()[0].forward_mode is ForwardMode.PREFILL


def test_the_first_steps_of_the_process_are_warm_up(record: Make) -> None:
    """As many as configured, sampled or not; a step may say otherwise."""
    recording = record(warmup_steps=2, buffers=16)
    for warmup in (None, None, None, True, False):
        with recording.tracer.step(warmup=warmup):
            pass
    assert [step.warmup for step in recording.records()] == [True, True, False, True, False]


def test_only_cohorts_of_the_allow_list_are_kept(record: Make) -> None:
    """A label that nobody allowed never leaves the process: it may hold content."""
    recording = record(cohorts=("code", "prose"))
    for cohort in ("code", "user 4711", ""):
        with recording.tracer.step(cohort=cohort):
            pass
    assert [step.cohort for step in recording.records()] == ["code", "", ""]


def test_a_placement_version_holds_from_the_next_step_on(record: Make) -> None:
    """Counts of a step are read against the placement it began with."""
    recording = record()
    with recording.tracer.step():
        recording.tracer.placement(4)
    with recording.tracer.step():
        pass
    assert [step.placement_version for step in recording.records()] == [0, 4]


@pytest.mark.parametrize(
    "arguments",
    [
        {"forward_mode": "training"},
        {"microbatch": -1},
        {"microbatch": 65_536},
        {"microbatch": None},
        {"step": "seven"},
        {"step": 1.5},
    ],
    ids=str,
)
def test_a_wrong_argument_of_a_step_never_reaches_the_model(record: Make, arguments: dict[str, Any]) -> None:
    """The body runs, the step is not recorded, the fault is counted, and the next step is fine."""
    recording, ran = record(buffers=1), []
    for _ in range(3):  # more often than there are buffers: none may leak
        with recording.tracer.step(**arguments):
            ran.append(1)
    with recording.tracer.step(50):
        pass
    assert ran == [1, 1, 1]
    assert numbers(recording.records()) == [50]
    assert recording.tracer.guard.errors == {"step": 3}
    assert accounted(recording)


@pytest.mark.parametrize("number", [-1, HIGHEST_STEP + 1, 2**63 - 1, 2**63])
def test_a_number_that_no_collector_takes_is_counted_and_ends_nothing(
    record: Make, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """However often it comes, it is told once and counted each time; good numbers are recorded behind it."""
    recording = record()
    with caplog.at_level(logging.WARNING):
        for _ in range(FAILURES_BEFORE_OFF + 1):
            with recording.tracer.step(number):
                pass
        with recording.tracer.step(50):
            pass
    assert not recording.tracer.shutdown()
    assert numbers(recording.records()) == [50]
    assert recording.tracer.metrics.dropped == {DropReason.STEP_OUT_OF_RANGE: FAILURES_BEFORE_OFF + 1}
    assert len([message for message in caplog.messages if f"step={number}" in message]) == 1
    assert accounted(recording)


def test_a_tracer_that_samples_nothing_has_lost_no_step(record: Make) -> None:
    """Whatever number a step has."""
    recording = record(sample="0")
    with recording.tracer.step(-1):
        pass
    assert recording.tracer.shutdown()
    assert not recording.tracer.metrics.dropped


def test_what_follows_the_highest_number_is_counted_until_a_lower_one_comes(record: Make) -> None:
    """There is none behind the highest: such steps are dropped with a reason, and never fail silently."""
    recording = record()
    for number in (HIGHEST_STEP, *[None] * (FAILURES_BEFORE_OFF + 1), 7, None):
        with recording.tracer.step(number):
            pass
    assert numbers(recording.records()) == [HIGHEST_STEP, 7, 8]
    assert recording.tracer.metrics.dropped == {DropReason.STEP_OUT_OF_RANGE: FAILURES_BEFORE_OFF + 1}
    assert recording.tracer.guard.errors == {}


def test_a_wrong_argument_is_named_in_the_log_once(record: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The first fault of a stage is one log line that says what was wrong."""
    recording = record()
    with caplog.at_level(logging.WARNING, "moetrace"):
        for _ in range(3):
            with recording.tracer.step(forward_mode="training"):
                pass
    (line,) = caplog.messages
    assert "stage step failed (ValueError: 'training' is not a valid ForwardMode)" in line
    assert "the model is not affected" in line


def test_numbers_of_other_types_are_taken(record: Make) -> None:
    """A step counter may be a tensor's or an array's integer."""
    recording = record()
    with recording.tracer.step(torch.tensor(5)):  # type: ignore[arg-type]
        pass
    assert numbers(recording.records()) == [5]


# --- what is dropped -----------------------------------------------------------------------------


def stuck(recording: Recording) -> list[Any]:
    """Keeps handed-over buffers from the drain thread."""
    held: list[Any] = []
    pool = recording.tracer._buffers.ready(None)
    pool.hand_over = held.append  # type: ignore[method-assign]
    return held


def test_a_step_without_a_free_buffer_is_dropped_and_counted(record: Make) -> None:
    """When the drain thread is behind, the model does not wait for it."""
    recording = record(buffers=2)
    held = stuck(recording)
    for _ in range(5):
        with recording.tracer.step():
            pass
    assert len(held) == 2
    assert recording.tracer.metrics.dropped == {DropReason.BUFFER_POOL_EMPTY: 3}


def test_a_step_beyond_its_buffer_is_dropped_and_counted(record: Make) -> None:
    """Missing intervals would show as time outside the layers: the step goes as a whole."""
    recording = record(max_intervals=16)
    wrapped = recording.tracer.wrap(router=lambda: None, layer=0)
    for calls in (16, 20):
        with recording.tracer.step():
            for _ in range(calls):
                recording.time.advance(1)
                wrapped.router()
    assert numbers(recording.records()) == [0]
    assert recording.tracer.metrics.dropped == {DropReason.BUFFER_FULL: 1}
    assert recording.tracer.metrics.dropped_intervals == 4
    assert accounted(recording)


def test_a_step_that_is_open_at_shutdown_is_dropped_and_counted(record: Make) -> None:
    """Half a step says nothing; shutdown says that not everything was delivered."""
    recording = record()
    with recording.tracer.step():
        assert recording.tracer.shutdown() is False
    assert recording.emitter.records == []
    assert recording.tracer.metrics.dropped == {DropReason.STEP_ABORTED: 1}


def test_nothing_is_recorded_after_shutdown(record: Make) -> None:
    """Steps and forwards run on untouched."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    recording.tracer.shutdown()
    with recording.tracer.step():
        model(torch.randn(2, 8))
    assert recording.emitter.records == []
    assert recording.tracer.metrics.steps_sampled == 0


def test_an_exception_of_the_model_ends_its_step(record: Make) -> None:
    """It passes unchanged, and the step that it left is recorded."""
    recording = record()
    error = RuntimeError("of the model")

    def step() -> None:
        with recording.tracer.step():
            recording.time.advance(9)
            raise error

    with pytest.raises(RuntimeError) as caught:
        step()
    assert caught.value is error
    assert [step.duration_ns for step in recording.records()] == [9]


def test_an_exception_of_a_forward_ends_its_own_step(record: Make) -> None:
    """The next forward is a step again."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    with pytest.raises(AttributeError):
        model(None)
    model(torch.randn(1, 8))
    assert numbers(recording.records()) == [0, 1]


# --- our own failures ----------------------------------------------------------------------------


class BrokenClock(HostClock):
    """Fails to stamp when told to."""

    def __init__(self) -> None:
        self.broken = False
        self.time = FakeTime()
        super().__init__(self._now)

    def _now(self) -> int:
        if self.broken:
            raise OSError("clock is gone")
        return self.time.now_ns()


def test_a_clock_that_fails_never_reaches_the_model(record: Make) -> None:
    """Steps run on without being recorded, and are accounted for."""
    clock = BrokenClock()
    recording, model = record(clock=clock, buffers=2), Model()
    recording.tracer.instrument(model)
    hidden = torch.randn(2, 8)
    with recording.tracer.step():
        expected = model(hidden)
    clock.broken = True
    for _ in range(4):
        with recording.tracer.step():
            assert torch.equal(model(hidden), expected)
    clock.broken = False
    with recording.tracer.step():
        clock.broken = True
        assert torch.equal(model(hidden), expected)
    clock.broken = False
    with recording.tracer.step():
        model(hidden)
    assert numbers(recording.records()) == [0, 6]
    assert accounted(recording)


def test_after_too_many_faults_of_the_clock_no_step_is_recorded_any_more(record: Make) -> None:
    """A stage that keeps failing is switched off: the run goes on at the cost of an untraced one."""
    clock = BrokenClock()
    recording = record(clock=clock)
    wrapped = recording.tracer.wrap(router=lambda: 1, layer=0)
    with recording.tracer.step():
        clock.broken = True
        assert [wrapped.router() for _ in range(FAILURES_BEFORE_OFF)] == [1] * FAILURES_BEFORE_OFF
        clock.broken = False
    with recording.tracer.step():
        pass
    assert numbers(recording.records()) == [0]
    assert recording.tracer.metrics.steps_not_sampled == 1


def test_counting_that_keeps_failing_is_switched_off_alone(record: Make) -> None:
    """Times are recorded on; only the counts are missing."""
    recording, model = record(buffers=FAILURES_BEFORE_OFF + 4), Model()
    recording.tracer.instrument(model)
    for counter in recording.tracer._buffers.counters:
        counter.add = lambda *arguments: 1 / 0  # type: ignore[method-assign,assignment]
    attempts = FAILURES_BEFORE_OFF + 3
    for _ in range(attempts):
        with recording.tracer.step():
            model(torch.randn(2, 8))
    records = recording.records()
    assert len(records) == attempts
    assert recording.tracer.guard.errors == {"counts": FAILURES_BEFORE_OFF}
    assert all(step.experts == () for step in records)


def test_an_attention_mask_that_is_none_of_the_known_kinds_changes_nothing(record: Make) -> None:
    """A mask object of a framework is not padding; the model gets it as it is."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    mask = object()
    model(torch.randn(1, 2, 8), attention_mask=mask)
    (step,) = recording.records()
    assert [row.kind for row in step.experts] == [CountKind.ROUTED]
    assert recording.tracer.guard.errors == {}


def test_a_mask_of_one_forward_does_not_pad_the_next_router(record: Make) -> None:
    """Padding holds for its own forward: a router called outside of it has no mask."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    mask = torch.tensor([[0, 1, 1]])
    with recording.tracer.step():
        model(torch.randn(1, 3, 8), attention_mask=mask)
        model.mlp(torch.randn(3, 8))
    (step,) = recording.records()
    assert {row.kind: sum(row.counts) for row in step.experts} == {
        CountKind.ROUTED: 4 + 6,
        CountKind.PADDING: 2,
    }


def test_a_step_without_any_phase_is_outside(record: Make) -> None:
    """A traced step of something that is not wrapped is one row."""
    recording = record()
    with recording.tracer.step():
        recording.time.advance(3)
    (step,) = recording.records()
    assert [(row.layer, row.phase, row.duration_ns) for row in step.phases] == [(-1, Phase.OUTSIDE, 3)]
