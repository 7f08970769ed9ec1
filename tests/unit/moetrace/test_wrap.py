"""The wrappers on the hot path change nothing that a caller can see, and never raise of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch.utils import checkpoint

from moetrace.guard import FAILURES_BEFORE_OFF, Guard
from moetrace.instrument import compiled
from moetrace.instrument.wrap import timed, timed_launch, timed_wait
from moetrace.record.buffer import TICKET_SHIFT, StepBuffer
from moetrace.testing import FakeTime
from moetrace.timing.clock import HostClock
from moetrace_schemas.columns import RowFlag

SITE = 3


class Recorder:
    """What wrappers see of a tracer."""

    def __init__(self) -> None:
        self.time = FakeTime()
        self.guard = Guard()
        self.buffer: StepBuffer | None = StepBuffer(HostClock(self.time.now_ns), 16)

    def record_failed(self, error: BaseException) -> None:
        """Count it."""
        self.guard.caught("record", error)

    def intervals(self) -> list[tuple[int, int, int, int]]:
        """What was recorded."""
        assert self.buffer is not None
        return self.buffer.intervals()


class ControlFlow(BaseException):
    """Something that is thrown to steer, like GeneratorExit or a scheduler's preemption."""


WRAPPERS: list[Callable[[Callable[..., Any], Recorder], Callable[..., Any]]] = [
    lambda function, recorder: timed(function, recorder, SITE),
    lambda function, recorder: timed_launch(function, recorder, SITE, lambda result: 0),
    lambda function, recorder: timed_wait(function, recorder, SITE, lambda item: (1,), guess=True),
]
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS, ids=["timed", "launch", "wait"])


def in_flight(recorder: Recorder) -> None:
    """A wait records only where something was launched."""
    if recorder.buffer is not None:
        recorder.buffer.launch(1)


@every_wrapper
@pytest.mark.parametrize("recording", [True, False], ids=["on", "off"])
def test_arguments_and_result_are_the_callables_own(wrap: Callable[..., Any], recording: bool) -> None:
    """Positional, keyword and default arguments arrive as given, and the very same result comes back."""
    recorder = Recorder()
    if not recording:
        recorder.buffer = None
    in_flight(recorder)
    result = object()
    calls = []

    def function(a: int, b: int = 2, *rest: int, c: int, d: int = 4, **more: int) -> object:
        calls.append((a, b, rest, c, d, more))
        return result

    wrapped = wrap(function, recorder)
    assert wrapped(1, c=3) is result
    assert wrapped(1, 5, 6, 7, c=8, d=9, e=10) is result
    assert calls == [(1, 2, (), 3, 4, {}), (1, 5, (6, 7), 8, 9, {"e": 10})]


@every_wrapper
def test_signature_name_and_doc_are_the_callables_own(wrap: Callable[..., Any]) -> None:
    """Frameworks look at a forward's signature to decide what to pass."""

    def function(a: int, *, b: str = "x") -> None:
        """What it does."""

    wrapped = wrap(function, Recorder())
    assert inspect.signature(wrapped) == inspect.signature(function)
    assert (wrapped.__name__, wrapped.__doc__) == ("function", "What it does.")
    assert inspect.unwrap(wrapped) is function


@every_wrapper
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, ControlFlow, StopIteration, GeneratorExit])
def test_an_exception_passes_unchanged_and_closes_its_interval(
    wrap: Callable[..., Any], kind: type[BaseException]
) -> None:
    """Errors and control flow alike: the very same object arrives, and the interval says ERROR."""
    recorder = Recorder()
    in_flight(recorder)
    error = kind("of the model")

    def function() -> None:
        recorder.time.advance(10)
        raise error

    wrapped = wrap(function, recorder)
    with pytest.raises(kind) as caught:
        wrapped()
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    ((site, start, end, flags),) = recorder.intervals()
    assert (site, end - start) == (SITE, 10)
    assert flags & RowFlag.ERROR


def test_a_generator_function_is_still_one() -> None:
    """Wrapping does not run or exhaust what the callable returns."""

    def function() -> Generator[int, None, None]:
        yield 1
        yield 2

    assert list(timed(function, Recorder(), SITE)()) == [1, 2]


def test_a_call_becomes_one_interval_of_its_site() -> None:
    """Start and end mark are those of the call, nothing more."""
    recorder = Recorder()
    wrapped = timed(lambda: recorder.time.advance(25), recorder, SITE)
    recorder.time.advance(5)
    wrapped()
    assert recorder.intervals() == [(SITE, 1005, 1030, 0)]


def test_nothing_is_recorded_outside_a_step() -> None:
    """Off, a wrapper is the plain call: no mark is taken."""
    recorder = Recorder()
    buffer, recorder.buffer = recorder.buffer, None
    assert buffer is not None
    buffer.mark = lambda: pytest.fail("marked")
    assert timed(lambda: 1, recorder, SITE)() == 1
    assert buffer.intervals() == []


def test_observe_sees_arguments_and_result_after_the_end_mark() -> None:
    """What looks at a result is not charged to the phase."""
    recorder, seen = Recorder(), []

    def observe(buffer: StepBuffer, args: tuple[Any, ...], result: Any) -> None:
        recorder.time.advance(1000)
        seen.append((buffer is recorder.buffer, args, result))

    assert timed(lambda a, b: a + b, recorder, SITE, observe=observe)(1, b=2) == 3
    assert seen == [(True, (1,), 3)]
    assert recorder.intervals() == [(SITE, 1000, 1000, 0)]


def test_observe_does_not_run_for_a_call_that_raised() -> None:
    """There is no result to look at."""

    def observe(buffer: StepBuffer, args: tuple[Any, ...], result: Any) -> None:
        pytest.fail("observed")

    with pytest.raises(ZeroDivisionError):
        timed(lambda: 1 / 0, Recorder(), SITE, observe=observe)()


def failing(*arguments: Any) -> Any:
    """A fault of ours."""
    raise RuntimeError("of the tracer")


@every_wrapper
def test_a_clock_that_fails_at_the_start_costs_the_interval_and_nothing_else(
    wrap: Callable[..., Any],
) -> None:
    """The model gets its result; the fault is counted under `record`."""
    recorder = Recorder()
    in_flight(recorder)
    assert recorder.buffer is not None
    recorder.buffer.mark = failing
    assert wrap(lambda: "result", recorder)() == "result"
    assert recorder.intervals() == []
    assert recorder.guard.errors == {"record": 1}


@every_wrapper
def test_a_clock_that_fails_at_the_end_costs_the_interval_and_nothing_else(
    wrap: Callable[..., Any],
) -> None:
    """The model gets its result; the fault is counted under `record`."""
    recorder = Recorder()
    in_flight(recorder)
    assert recorder.buffer is not None
    marks = iter([1])
    recorder.buffer.mark = lambda: next(marks)
    assert wrap(lambda: "result", recorder)() == "result"
    assert recorder.guard.errors == {"record": 1}


@every_wrapper
def test_a_clock_that_fails_does_not_hide_the_models_exception(wrap: Callable[..., Any]) -> None:
    """When both fail, the model's exception is what arrives."""
    recorder = Recorder()
    in_flight(recorder)
    assert recorder.buffer is not None
    marks = iter([1])
    recorder.buffer.mark = lambda: next(marks)

    def function() -> None:
        raise KeyError("of the model")

    with pytest.raises(KeyError, match="of the model"):
        wrap(function, recorder)()
    assert recorder.guard.errors == {"record": 1}


@every_wrapper
def test_a_mark_that_is_no_number_is_our_fault_and_not_the_models(wrap: Callable[..., Any]) -> None:
    """A buffer that refuses a value loses the interval, whole."""
    recorder = Recorder()
    in_flight(recorder)
    assert recorder.buffer is not None
    recorder.buffer.mark = lambda: "soon"  # type: ignore[assignment,return-value]
    assert wrap(lambda: 1, recorder)() == 1
    assert recorder.intervals() == []
    assert recorder.guard.errors == {"record": 1}


def test_an_observer_that_fails_is_counted() -> None:
    """A fault in looking at a result never reaches the model."""
    recorder = Recorder()
    assert timed(lambda: 1, recorder, SITE, observe=failing)() == 1
    assert recorder.guard.errors == {"record": 1}
    assert len(recorder.intervals()) == 1


def test_a_full_buffer_is_no_fault() -> None:
    """Beyond the capacity the model runs on, and the buffer counts."""
    recorder = Recorder()
    wrapped = timed(lambda: 1, recorder, SITE)
    assert [wrapped() for _ in range(20)] == [1] * 20
    assert recorder.buffer is not None
    assert recorder.buffer.overflow == 4
    assert recorder.guard.errors == {}


def test_a_forward_inside_backward_is_flagged_as_recompute() -> None:
    """Activation checkpointing calls a wrapped forward again, and only the second call says so."""
    recorder = Recorder()
    wrapped = timed(lambda x: (x * x).sin(), recorder, SITE)
    x = torch.ones(3, requires_grad=True)
    checkpoint.checkpoint(wrapped, x, use_reentrant=False).sum().backward()
    assert [flags for *_, flags in recorder.intervals()] == [0, RowFlag.RECOMPUTE]


def test_a_recompute_that_stops_early_is_no_error() -> None:
    """Checkpointing leaves a recomputed forward by an exception of its own once it has seen enough."""
    recorder = Recorder()
    # The last operation saves nothing for backward, so that recompute stops before it.
    wrapped = timed(lambda x: (x * x).sin() + 1, recorder, SITE)
    x = torch.ones(3, requires_grad=True)
    with checkpoint.set_checkpoint_early_stop(True):
        checkpoint.checkpoint(wrapped, x, use_reentrant=False).sum().backward()
    assert [flags for *_, flags in recorder.intervals()] == [0, RowFlag.RECOMPUTE]


def test_an_error_in_recompute_is_an_error_in_backward() -> None:
    """Both facts are told: that it raised, and that it was activation recompute."""
    recorder = Recorder()
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("second time")
        return x * x

    x = torch.ones(3, requires_grad=True)
    result = checkpoint.checkpoint(timed(function, recorder, SITE), x, use_reentrant=False).sum()
    with pytest.raises(ValueError, match="second time"):
        result.backward()
    assert recorder.intervals()[1][3] == RowFlag.RECOMPUTE | RowFlag.ERROR


def test_launch_and_wait_carry_one_ticket() -> None:
    """A result that is not there yet makes the call a launch, ended by the wait for it."""
    recorder = Recorder()
    pending = object()
    launch = timed_launch(lambda: pending, recorder, 1, lambda result: id(result))
    wait = timed_wait(lambda item: item, recorder, 2, lambda item: (id(item),), guess=True)
    assert wait(launch()) is pending
    (site, *_, flags), (wait_site, *_, wait_flags) = recorder.intervals()
    assert (site, flags & RowFlag.ASYNC, flags >> TICKET_SHIFT) == (1, RowFlag.ASYNC, 1)
    assert (wait_site, wait_flags >> TICKET_SHIFT) == (2, 1)


def test_a_result_that_is_there_is_no_launch() -> None:
    """A synchronous collective is an exchange as it stands; no wait is expected."""
    recorder = Recorder()
    timed_launch(lambda: 1, recorder, 1, lambda result: 0)()
    assert recorder.intervals() == [(1, 1000, 1000, 0)]
    assert recorder.buffer is not None
    assert not recorder.buffer.in_flight


def test_of_nested_launches_the_inner_one_is_waited_for() -> None:
    """A wrapper around a wrapped collective hands on its result; it is no second exchange."""
    recorder = Recorder()
    inner = timed_launch(lambda: 5, recorder, 1, lambda result: 5)
    outer = timed_launch(lambda: inner(), recorder, 2, lambda result: 5)
    outer()
    assert [(site, bool(flags & RowFlag.ASYNC)) for site, *_, flags in recorder.intervals()] == [
        (1, True),
        (2, False),
    ]


def test_a_wait_for_anything_else_is_not_recorded() -> None:
    """Waits of the application's own collectives are none of ours."""
    recorder = Recorder()
    wait = timed_wait(lambda item: item, recorder, 2, lambda item: (item,), guess=False)
    assert wait(7) == 7
    in_flight(recorder)
    assert wait(7) == 7
    assert recorder.intervals() == []


def test_while_a_graph_is_traced_a_wrapper_returns_the_callables_own_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where torch cannot hold marks in a graph, a traced call is the plain call."""
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    monkeypatch.setattr(compiled, "AVAILABLE", False)
    recorder = Recorder()
    in_flight(recorder)
    for wrap in WRAPPERS:
        assert wrap(lambda: 1, recorder)() == 1
    assert recorder.intervals() == []


def test_faults_beyond_the_limit_switch_the_stage_off() -> None:
    """The guard gives a stage up after so many faults; the model never sees one."""
    recorder = Recorder()
    assert recorder.buffer is not None
    recorder.buffer.mark = failing
    wrapped = timed(lambda: 1, recorder, SITE)
    assert [wrapped() for _ in range(FAILURES_BEFORE_OFF)] == [1] * FAILURES_BEFORE_OFF
    assert recorder.guard.is_off("record")
