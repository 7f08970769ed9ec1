"""The wrappers on the hot path. Nothing here may wait, allocate per token, or raise into the model.

Off (no sampled step is open) a wrapper costs one attribute read. On, it takes two marks and writes
four integers into a preallocated array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from moetrace.instrument.patches import MARK
from moetrace.record.buffer import StepBuffer
from moetrace_schemas.columns import RowFlag

_ERROR = int(RowFlag.ERROR)
_ASYNC = int(RowFlag.ASYNC)
_RECOMPUTE = int(RowFlag.RECOMPUTE)


class Recorder(Protocol):
    """What wrappers see of the tracer."""

    buffer: StepBuffer | None
    """The sampled step that is being recorded, or None."""


Observer = Callable[[StepBuffer, tuple[Any, ...], Any], None]
"""Looks at a call's positional arguments and result (counts, rows). Guarded by the caller."""


def _never() -> bool:
    return False


def _no_task() -> int:
    return -1


def _torch_state() -> tuple[Callable[[], bool], Callable[[], int]]:
    """(is torch.compile tracing this frame, id of the autograd graph task that runs now or -1)."""
    try:
        import torch
    except ImportError:
        return _never, _no_task
    compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
    task: Callable[[], int] = torch._C._current_graph_task_id
    return compiling, task


def timed(
    function: Callable[..., Any],
    recorder: Recorder,
    site: int,
    *,
    observe: Observer | None = None,
    failed: Callable[[BaseException], None] | None = None,
) -> Callable[..., Any]:
    """Wrap a callable so that each call becomes one interval of `site`.

    Signature, arguments, result and exceptions are the callable's own. `observe` runs after the end
    mark, so that its cost is not charged to the phase.
    """
    compiling, graph_task = _torch_state()

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Dynamo folds this to a constant: a traced call is the plain call, with no graph break.
        if compiling():
            return function(*args, **kwargs)
        buffer = recorder.buffer
        if buffer is None:
            return function(*args, **kwargs)
        mark = buffer.mark
        start = mark()
        try:
            result = function(*args, **kwargs)
        except BaseException:
            buffer.add(site, start, mark(), _ERROR)
            raise
        # A forward inside backward is activation recompute.
        flags = 0 if graph_task() == -1 else _RECOMPUTE
        buffer.add(site, start, mark(), flags)
        if observe is not None:
            try:
                observe(buffer, args, result)
            except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
                if failed is not None:
                    failed(error)
        return result

    setattr(wrapper, MARK, function)
    return wrapper


def timed_launch(
    function: Callable[..., Any],
    recorder: Recorder,
    site: int,
    is_pending: Callable[[Any], bool],
) -> Callable[..., Any]:
    """Wrap a collective that may return before its result is there.

    `is_pending(result)` says so; the interval is then only the launch, and the wait that follows
    ends the exchange (moetrace.record.assemble).
    """
    compiling, graph_task = _torch_state()

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return function(*args, **kwargs)
        buffer = recorder.buffer
        if buffer is None:
            return function(*args, **kwargs)
        pending = buffer.pending
        mark = buffer.mark
        start = mark()
        try:
            result = function(*args, **kwargs)
        except BaseException:
            buffer.add(site, start, mark(), _ERROR)
            raise
        flags = 0 if graph_task() == -1 else _RECOMPUTE
        # A launch inside this call (a wrapper around a collective that is wrapped too) is the one
        # that the wait will end.
        if buffer.pending == pending and is_pending(result):
            flags |= _ASYNC
            buffer.pending += 1
        buffer.add(site, start, mark(), flags)
        return result

    setattr(wrapper, MARK, function)
    return wrapper


def timed_wait(function: Callable[..., Any], recorder: Recorder, site: int) -> Callable[..., Any]:
    """Wrap the wait for a launched exchange; waits for anything else are not recorded."""
    compiling, _ = _torch_state()

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return function(*args, **kwargs)
        buffer = recorder.buffer
        if buffer is None or buffer.pending == 0:
            return function(*args, **kwargs)
        # Taken before the call: a wait may reach another wrapped wait for the same exchange.
        buffer.pending -= 1
        mark = buffer.mark
        start = mark()
        try:
            return function(*args, **kwargs)
        finally:
            buffer.add(site, start, mark())

    setattr(wrapper, MARK, function)
    return wrapper
