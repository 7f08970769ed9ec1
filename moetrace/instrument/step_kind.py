"""What a step is: training, prefill or decode; real, dummy or warm-up. Where nobody says it, who knows does.

Asked in this order: the caller (`step(forward_mode=...)`), the configuration, the engine that runs the
forward (adapters with `EngineCall`s), the call of an instrumented model, and last whether gradients are on
and a model trains when the step begins. A step of several kinds is `train` if one of them is, else `mixed`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moetrace.adapters.base import EngineCall, StepFacts
from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.wrap import TorchState
from moetrace.record.buffer import StepBuffer
from moetrace_schemas.enums import ForwardMode

if TYPE_CHECKING:
    from moetrace.config import Config
    from moetrace.instrument.steps import StepOwner


class StepKind:
    """What one tracer knows of the step that runs now, or begins."""

    def __init__(self, config: Config) -> None:
        self._configured = config.forward_mode
        self._warmup_steps = config.warmup_steps
        self._state: TorchState | None = None
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        """Instrumented models."""
        self.facts: StepFacts | None = None
        """What the engine says of the forward that it runs now."""

    def mode(self, said: ForwardMode | str | None) -> tuple[ForwardMode, bool]:
        """The mode of a step that begins, and whether it was told and is no guess.

        Raises:
            ValueError: an unknown forward mode.
        """
        if said is not None:
            return ForwardMode(said), True
        if self._configured:
            return ForwardMode(self._configured), True
        if self.facts is not None and self.facts.forward_mode is not None:
            return self.facts.forward_mode, True
        # Kept once torch is there: a process may import it after the tracer was made.
        self._state = self._state or TorchState()
        trains = any(model.training for model in self.models) if self.models else True
        return (ForwardMode.TRAIN if trains and self._state.grad_enabled() else ForwardMode.PREFILL), False

    def is_warmup(self, said: bool | None, steps_begun: int) -> bool:
        """Whether a step that begins is warm-up."""
        if said is not None:
            return bool(said)
        return steps_begun < self._warmup_steps or (self.facts is not None and self.facts.warmup)

    def is_dummy(self, said: bool) -> bool:
        """Whether a step that begins is a dummy batch."""
        return said or (self.facts is not None and self.facts.dummy)


def is_due(period: int, recorded: int) -> bool:
    """Whether something that is done in the first recorded step and then in every n-th is done now."""
    return period > 0 and recorded % period == 0


def mode_of_call(
    training: bool, grad_enabled: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ForwardMode:
    """The mode of a model's call: decode where it takes one token per sequence beside a cache.

    Looks at shapes only. Tokens that are packed without a batch dimension do not say it: prefill.
    """
    if training and grad_enabled:
        return ForwardMode.TRAIN
    tokens = kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds", args[0] if args else None)
    one = getattr(tokens, "ndim", 0) >= 2 and tokens.shape[1] == 1  # type: ignore[union-attr]
    return ForwardMode.DECODE if one and kwargs.get("past_key_values") is not None else ForwardMode.PREFILL


def note_call(
    owner: StepOwner,
    buffer: StepBuffer,
    model: Any,
    grad_enabled: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Let the call of an instrumented model say what the open step is for."""
    facts = owner.kind.facts
    if facts is None or facts.forward_mode is None:
        buffer.note_mode(mode_of_call(model.training, grad_enabled, args, kwargs))


def engine_step(function: Callable[..., Any], owner: StepOwner, call: EngineCall) -> Callable[..., Any]:
    """Wrap a call of an engine that runs forwards: it is a step where none is open, and says of what kind.

    Of calls within each other the outermost one says it.
    """
    from moetrace.instrument.steps import StepScope

    active = True

    def read(found: list[StepFacts], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        facts = call.read(args, kwargs)
        if facts is not None:
            found.append(facts)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        found: list[StepFacts] = []
        if active and not owner.closed:
            owner.guard.run("engine", read, found, args, kwargs)
        if not found:
            return function(*args, **kwargs)
        kind, before, is_step = owner.kind, owner.kind.facts, found[0].is_step
        kind.facts = before or found[0]
        try:
            if is_step and not owner.open_scopes:
                with StepScope(owner):
                    return function(*args, **kwargs)
            buffer = owner.buffer
            if is_step and buffer is not None and kind.facts.forward_mode is not None:
                buffer.note_mode(kind.facts.forward_mode)
            return function(*args, **kwargs)
        finally:
            kind.facts = before

    def make_passive() -> None:
        nonlocal active
        active = False

    return mark_wrapper(wrapper, function, make_passive)
