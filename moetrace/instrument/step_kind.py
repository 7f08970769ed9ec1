"""What a step is: training, prefill or decode; real, dummy or warm-up. Where nobody says it, who knows does.

Asked in this order: the caller (`step(forward_mode=...)`), the configuration, the engine that runs the
forward (adapters with `EngineCall`s), the call of an instrumented model, and last whether gradients are on
and a model trains when the step begins. A step of several kinds is `train` if one of them is, else `mixed`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from moetrace.adapters.base import EngineCall, StepFacts
from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.torch_state import TorchState, graphs_compiled
from moetrace.record.buffer import StepBuffer
from moetrace_schemas.enums import ForwardMode

if TYPE_CHECKING:
    from moetrace.config import Config
    from moetrace.instrument.steps import StepOwner

TUNER = "triton.runtime.autotuner"
"""Where Triton tries the configurations of a kernel, the first time that it sees a shape."""
HIGHEST_MICROBATCH = 65_535
"""The wire's microbatch column is a uint16."""


class StepKind:
    """What one tracer knows of the step that runs now, or begins."""

    def __init__(self, config: Config) -> None:
        self._configured = config.forward_mode
        self._warmup_steps = config.warmup_steps
        self._state = TorchState()
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        """Instrumented models."""
        self.facts: StepFacts | None = None
        """What the engine says of the forward that it runs now."""
        self.tunings = 0
        """How often Triton has tuned a kernel."""
        self.in_graphs: list[int] = []
        """Numbers of the models whose compiled forwards run now, outermost first; no step is around them."""

    def mode(self, said: ForwardMode | str | None) -> tuple[ForwardMode, bool]:
        """The mode of a step that begins, and whether it was told and is no guess.

        Raises:
            ValueError: an unknown forward mode.
        """
        if said is not None:
            try:
                return ForwardMode(said), True
            except ValueError:
                raise ValueError(f"forward_mode={said!r}: one of {', '.join(ForwardMode)} expected") from None
        if self._configured:
            return ForwardMode(self._configured), True
        if self.facts is not None:
            # An engine batches prompts and answers: what nobody says, and no call shows, is either.
            return self.facts.forward_mode or ForwardMode.MIXED, self.facts.forward_mode is not None
        trains = any(model.training for model in self.models) if self.models else True
        return (ForwardMode.TRAIN if trains and self._state.grad_enabled() else ForwardMode.PREFILL), False

    def is_warmup(self, said: bool | None, steps_begun: int) -> bool:
        """Whether a step that begins is warm-up."""
        if said is not None:
            return bool(said)
        return steps_begun < self._warmup_steps or (self.facts is not None and self.facts.warmup)

    def is_dummy(self, said: bool) -> bool:
        """Whether a step that begins is a dummy batch."""
        return bool(said) or (self.facts is not None and self.facts.dummy)

    def compilations(self) -> int:
        """Goes up where something is compiled or tuned: in a step where it did, times are not the model's."""
        # Imported in the middle of a step, for the first kernel: what that one tuned went unseen.
        return graphs_compiled() + self.tunings + (TUNER in sys.modules)


def check_microbatch(said: int) -> int:
    """A microbatch's index as a plain number.

    Raises:
        ValueError: no whole number, or one that the wire cannot hold.
    """
    try:
        number = operator.index(said)
    except TypeError:
        number = -1
    if not 0 <= number <= HIGHEST_MICROBATCH:
        raise ValueError(f"microbatch={said!r}: 0 to {HIGHEST_MICROBATCH} expected")
    return number


def is_due(period: int, recorded: int) -> bool:
    """Whether something that is done in the first recorded step and then in every n-th is done now."""
    return period > 0 and recorded % period == 0


PACKED, UNKNOWN = 0, -1
"""Instead of tokens per sequence: tokens without a batch dimension, and no tokens that are known."""
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
"""What a call's tokens are called; of an encoder and a decoder, the decoder's."""
_CACHES = ("cache", "past_key_values", "cache_params")
"""What a call's cache is called: transformers renames it, and models take both names for a while."""


def has_cache(kwargs: dict[str, Any]) -> bool:
    """Whether a call is given a cache of what went before, empty or not."""
    return any(kwargs.get(name) is not None for name in _CACHES)


def tokens_per_sequence(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Second dimension of a call's tokens, or PACKED or UNKNOWN. Dynamo follows it, and guards nothing."""
    tokens = args[0] if args else None
    for name in reversed(_TOKENS):
        if kwargs.get(name) is not None:
            tokens = kwargs[name]
    dimensions = getattr(tokens, "ndim", 0)
    if dimensions >= 2:
        return tokens.shape[1]  # type: ignore[union-attr]
    return PACKED if dimensions == 1 else UNKNOWN


def mode_of_call(trains: bool, cached: bool, length: int) -> ForwardMode:
    """The mode of a model's call: decode where it takes one token per sequence beside a cache.

    Args:
        trains: the module trains, with gradients on.
        cached: it was given a cache.
        length: see `tokens_per_sequence`. Packed tokens may be of prompts and answers: mixed.
    """
    if trains:
        return ForwardMode.TRAIN
    if length == PACKED:
        return ForwardMode.MIXED
    return ForwardMode.DECODE if length == 1 and cached else ForwardMode.PREFILL


def note_call(
    owner: StepOwner,
    buffer: StepBuffer,
    model: Any,
    grad_enabled: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Let the call of an instrumented model say what the open step is for."""
    trains = model.training and grad_enabled
    note_shape(owner, buffer, trains, has_cache(kwargs), tokens_per_sequence(args, kwargs))


def note_shape(owner: StepOwner, buffer: StepBuffer, trains: bool, cached: bool, length: int) -> None:
    """The same by what is left of a call in a compiled graph; see `mode_of_call`."""
    facts = owner.kind.facts
    if facts is None or facts.forward_mode is None:
        buffer.note_mode(mode_of_call(trains, cached, length))


@contextlib.contextmanager
def _dummy_inside(owner: StepOwner, buffer: StepBuffer) -> Iterator[None]:
    """Inside, only what this rank's experts do is counted: a dummy batch in a step opened for others."""
    counter = buffer.counter
    if counter is not None:
        counter.begin_dummy()
    try:
        yield
    finally:
        if counter is not None and owner.buffer is buffer:
            counter.in_dummy = False


def tuning_noted(function: Callable[..., Any], kind: StepKind) -> Callable[..., Any]:
    """Wrap what Triton asks for the configurations of a kernel that has none for this shape yet."""
    active = True

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if active:
            kind.tunings += 1
        return function(*args, **kwargs)

    def make_passive() -> None:
        nonlocal active
        active = False

    return mark_wrapper(wrapper, function, make_passive)


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
            if buffer is None:
                return function(*args, **kwargs)
            if is_step and kind.facts.forward_mode is not None:
                buffer.note_mode(kind.facts.forward_mode)
            if before is not None:
                # The outer call's facts are in the step.
                return function(*args, **kwargs)
            buffer.warmup |= kind.facts.warmup
            with _dummy_inside(owner, buffer) if kind.facts.dummy else contextlib.nullcontext():
                return function(*args, **kwargs)
        finally:
            kind.facts = before

    def make_passive() -> None:
        nonlocal active
        active = False

    return mark_wrapper(wrapper, function, make_passive)
