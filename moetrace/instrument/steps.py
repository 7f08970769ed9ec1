"""The step as a context manager, and the top module's forward, which is a step where none is open."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from moetrace.guard import Guard
from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.recorders import NOBODY, key_of
from moetrace.instrument.silent_sites import ForwardCalls
from moetrace.instrument.step_kind import StepKind, note_call
from moetrace.instrument.torch_state import TorchState
from moetrace.record.buffer import StepBuffer
from moetrace_schemas.enums import ForwardMode

_numbers = itertools.count()
"""Of instrumented models in this process, for graphs: those of two may run within each other."""


class StepOwner(Protocol):
    """What a step needs of the tracer."""

    buffer: StepBuffer | None
    guard: Guard
    kind: StepKind
    open_scopes: int
    """Steps that were entered and not left: inside one, a forward is no step of its own."""

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more."""
        ...

    def begin_step(
        self,
        scope: object,
        step: int | None,
        forward_mode: ForwardMode | str | None,
        microbatch: int,
        cohort: str,
        warmup: bool | None,
        dummy: bool = False,
    ) -> None:
        """Open a step on behalf of `scope`."""
        ...

    def end_step(self, scope: object) -> None:
        """Close the step that `scope` opened, if it is still the open one."""
        ...


class StepScope:
    """Context manager of one step. Never raises of its own."""

    __slots__ = ("_arguments", "_owner")

    def __init__(
        self,
        owner: StepOwner,
        step: int | None = None,
        forward_mode: ForwardMode | str | None = None,
        microbatch: int = 0,
        cohort: str = "",
        warmup: bool | None = None,
        dummy: bool = False,
    ) -> None:
        self._owner = owner
        self._arguments = (step, forward_mode, microbatch, cohort, warmup, dummy)

    def __enter__(self) -> StepScope:
        self._owner.open_scopes += 1
        self._owner.guard.run("step", self._owner.begin_step, self, *self._arguments)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.open_scopes -= 1
        self._owner.guard.run("step", self._owner.end_step, self)


def top_forward(
    owner: StepOwner, model: Any, forward: Callable[..., Any], mask_at: int, calls: ForwardCalls
) -> Callable[..., Any]:
    """Wraps a model's forward: notes padding, and is a step of its own where none is open.

    Args:
        owner: the tracer.
        model: whose forward it is.
        forward: the model's forward.
        mask_at: position of `attention_mask` among its parameters, -1 where it has none.
        calls: noted in recorded steps, for coverage.
    """
    state = TorchState()
    compiling, traced_step, key = state.compiling, state.traced_step, key_of(owner)
    grad_enabled, number = state.grad_enabled, next(_numbers)
    active = True

    def with_padding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        buffer = owner.buffer
        if buffer is None:
            return forward(*args, **kwargs)
        calls.started += 1
        if not buffer.mode_told:
            owner.guard.run(
                "forward_mode", note_call, owner, buffer, model, state.grad_enabled(), args, kwargs
            )
        counter = buffer.counter
        before = None
        if counter is not None:
            before = counter.padding
            owner.guard.run("padding", note_padding, counter, args, kwargs, mask_at)
        try:
            return forward(*args, **kwargs)
        finally:
            if owner.buffer is not buffer:
                calls.outlived += 1
            elif counter is not None:
                counter.padding = before

    def unrecorded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # It runs for its ops alone, and what would be recorded became part of the program.
        buffer, owner.buffer = owner.buffer, None
        try:
            return forward(*args, **kwargs)
        finally:
            owner.buffer = buffer

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            if traced_step is None:
                return forward(*args, **kwargs)
            trains = model.training and grad_enabled()
            mask = mask_of(args, kwargs, mask_at)
            return traced_step(forward, key, number, mask, trains, args, kwargs)
        if not active or owner.closed:
            return forward(*args, **kwargs)
        if state.exporting():
            return unrecorded(args, kwargs)
        if owner.open_scopes:
            return with_padding(args, kwargs)
        with StepScope(owner):
            return with_padding(args, kwargs)

    @functools.wraps(forward)
    def generator(*args: Any, **kwargs: Any) -> Any:
        # The body runs when it is asked for values: the step lasts from the first to the end.
        if not active or owner.closed or owner.open_scopes:
            return (yield from forward(*args, **kwargs))
        with StepScope(owner):
            return (yield from with_padding(args, kwargs))

    def make_passive() -> None:
        nonlocal active, key
        active, key = False, NOBODY

    chosen = generator if inspect.isgeneratorfunction(forward) else wrapper
    return mark_wrapper(chosen, forward, make_passive)


def note_padding(counter: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mask_at: int) -> None:
    """Tell a step's counter which tokens of the running forward are padding, from its attention mask."""
    from moetrace.instrument.routing import padding_flags

    counter.padding = None
    counter.padding = padding_flags(mask_of(args, kwargs, mask_at))


def mask_of(args: tuple[Any, ...], kwargs: dict[str, Any], mask_at: int) -> Any:
    """The attention mask [B, S] of the tokens that run now, or None."""
    mask = kwargs.get("attention_mask")
    if mask is None and 0 <= mask_at < len(args):
        mask = args[mask_at]
    if mask is None or not hasattr(mask, "dim") or mask.dim() != 2:
        return None
    tokens = kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds", args[0] if args else None)
    # With a key-value cache the mask also covers the past; only the last tokens run now.
    if tokens is not None and tokens.dim() >= 2 and tokens.shape[1] < mask.shape[1]:
        mask = mask[:, -tokens.shape[1] :]
    return mask
