"""The wrappers on the hot path. Nothing here may wait, allocate per token, or raise into the model.

Off (no sampled step is open) a wrapper costs one attribute read. On, it takes two marks and writes
four integers into a preallocated array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Protocol

from moetrace.guard import Guard
from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.torch_state import TorchState
from moetrace.record.buffer import TICKET_SHIFT, StepBuffer
from moetrace_schemas.columns import RowFlag

_ASYNC = int(RowFlag.ASYNC)
_RECOMPUTE = int(RowFlag.RECOMPUTE)


class Recorder(Protocol):
    """What wrappers see of the tracer."""

    buffer: StepBuffer | None
    """The sampled step that is being recorded, or None."""

    guard: Guard

    def record_failed(self, error: BaseException) -> None:
        """Count a fault of a clock or buffer. Never raises."""
        ...


class Retired:
    """The recorder of a wrapper that could not be taken out: it records nothing."""

    def __init__(self) -> None:
        self.buffer: StepBuffer | None = None
        self.guard = Guard()

    def record_failed(self, error: BaseException) -> None:
        """Nothing is recorded, so nothing fails."""


RETIRED = Retired()

Observer = Callable[[StepBuffer, tuple[Any, ...], Any], None]
"""Looks at a call's positional arguments and result (counts, rows)."""


def timed(
    function: Callable[..., Any], recorder: Recorder, site: int, *, observe: Observer | None = None
) -> Callable[..., Any]:
    """Wrap a callable so that each call becomes one interval of `site`.

    Signature, arguments, result and exceptions are the callable's own. `observe` runs after the end
    mark, so that its cost is not charged to the phase.
    """
    state = TorchState()
    compiling, graph_task, grad_enabled = state.compiling, state.graph_task, state.grad_enabled
    # What a router's result is counted as is part of its graph.
    index = getattr(observe, "index_in_graphs", -1)
    in_graph = state.in_graph(function, recorder, site, index)

    def learn() -> None:
        nonlocal compiling, graph_task, grad_enabled, in_graph
        compiling, graph_task, grad_enabled = state.compiling, state.graph_task, state.grad_enabled
        if recorder is not RETIRED:
            in_graph = state.in_graph(function, recorder, site, index)

    state.once_torch_is_there(learn)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Dynamo folds this to a constant: what it traces are ops, with no graph break.
        if compiling():
            return in_graph(*args, **kwargs)
        buffer = recorder.buffer
        if buffer is None:
            return function(*args, **kwargs)
        try:
            start = buffer.mark()
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            recorder.record_failed(error)
            return function(*args, **kwargs)
        try:
            if buffer.undivided and site in buffer.undivided:
                with buffer.undivided_call():
                    result = function(*args, **kwargs)
            else:
                result = function(*args, **kwargs)
        except BaseException as error:
            close_interval(buffer, recorder, site, start, state.error_flags(error))
            raise
        try:
            end = buffer.mark()
            buffer.add(site, start, end, 0 if graph_task() == -1 else _RECOMPUTE)
            if observe is not None:
                began = perf_counter_ns()
                observe(buffer, args, result)
                buffer.counting_ns += perf_counter_ns() - began
            if buffer.backward is not None and grad_enabled():
                buffer.backward.note(site, start, end, (args, kwargs), result)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            recorder.record_failed(error)
        return result

    def retire() -> None:
        nonlocal recorder, in_graph
        recorder, in_graph = RETIRED, function

    return mark_wrapper(wrapper, function, retire)


def timed_launch(
    function: Callable[..., Any],
    recorder: Recorder,
    site: int,
    handle_of: Callable[[Any], int],
) -> Callable[..., Any]:
    """Wrap a collective that may return before its result is there.

    `handle_of(result)` names what will be waited for, 0 where the result is there; the interval is
    then only the launch, and the wait that follows ends the exchange (moetrace.record.exchanges).
    """
    state = TorchState()
    compiling, in_graph = state.compiling, state.in_graph(function, recorder, site)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            # A graph has no launch that returns early: what it traces is an exchange with its wait.
            return in_graph(*args, **kwargs)
        buffer = recorder.buffer
        if buffer is None:
            return function(*args, **kwargs)
        try:
            launches = buffer.launches
            start = buffer.mark()
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            recorder.record_failed(error)
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            close_interval(buffer, recorder, site, start, state.error_flags(error))
            raise
        try:
            end, flags = buffer.mark(), state.flags()
            handle = handle_of(result)
            # A launch inside this call (a wrapper around a collective that is wrapped too) is the
            # one that the wait will end.
            if handle and buffer.launches == launches:
                flags |= _ASYNC | buffer.launch(handle) << TICKET_SHIFT
            buffer.add(site, start, end, flags)
            if buffer.backward is not None and state.grad_enabled():
                buffer.backward.note(site, start, end, (args, kwargs), result)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            recorder.record_failed(error)
        return result

    def retire() -> None:
        nonlocal recorder, in_graph
        recorder, in_graph = RETIRED, function

    return mark_wrapper(wrapper, function, retire)


def timed_wait(
    function: Callable[..., Any],
    recorder: Recorder,
    site: int,
    handles_of: Callable[[Any], tuple[int, ...]],
    *,
    guess: bool,
) -> Callable[..., Any]:
    """Wrap the wait for a launched exchange; waits for anything else are not recorded.

    `handles_of(first argument)` names what is waited for. With `guess`, a wait for something unknown
    (a view of the result) ends the oldest exchange in flight.
    """
    state = TorchState()
    compiling = state.compiling

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return function(*args, **kwargs)
        buffer = recorder.buffer
        if buffer is None or not buffer.in_flight:
            return function(*args, **kwargs)
        try:
            # Taken before the call: a wait may reach another wrapped wait for the same exchange.
            ticket = buffer.landed(handles_of(args[0]) if args else (), guess=guess)
            start = buffer.mark()
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            recorder.record_failed(error)
            ticket = 0
        if not ticket:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            flags = state.error_flags(error) | ticket << TICKET_SHIFT
            close_interval(buffer, recorder, site, start, flags)
            raise
        close_interval(buffer, recorder, site, start, state.flags() | ticket << TICKET_SHIFT)
        return result

    def retire() -> None:
        nonlocal recorder
        recorder = RETIRED

    return mark_wrapper(wrapper, function, retire)


def close_interval(buffer: StepBuffer, recorder: Recorder, site: int, start: int, flags: int) -> None:
    """End an interval now. Never raises."""
    try:
        buffer.add(site, start, buffer.mark(), flags)
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)
