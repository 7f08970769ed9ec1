"""Brackets one phase of hand-written code: `with tracer.phase("dispatch", layer=3)`."""

from __future__ import annotations

from types import TracebackType

from moetrace.errors import ConfigError, check_whole
from moetrace.instrument.torch_state import TorchState
from moetrace.instrument.wrap import Recorder, close_interval
from moetrace.record.buffer import StepBuffer
from moetrace.record.sites import Role, Site
from moetrace_schemas.enums import Phase

HIGHEST_LAYER = 32_767
"""The wire's layer column is an int16."""


def check_layer(layer: int | None) -> int | None:
    """A layer number that the wire can hold, as Python's own; None for none.

    Raises:
        ConfigError: it is none, or out of range.
    """
    if layer is None:
        return None
    number = check_whole("layer", layer)
    if not 0 <= number <= HIGHEST_LAYER:
        raise ConfigError(f"layer={layer}: 0 to {HIGHEST_LAYER} expected")
    return number


def phase_site(phase: Phase | str, layer: int | None) -> Site:
    """The call site of a hand-written phase.

    Raises:
        ConfigError: no such phase, or a layer out of range.
    """
    layer = check_layer(layer)
    try:
        known = Phase(phase)
    except ValueError:
        raise ConfigError(f"phase={phase!r}: one of {', '.join(Phase)} expected") from None
    role = Role.EXPERTS if known is Phase.EXPERT_GEMM else Role.PHASE
    return Site(role, known, layer, f"phase.{known}[{layer}]", per_step=False, alone=True)


class PhaseScope:
    """Context manager of one phase. Never raises of its own."""

    __slots__ = ("_buffer", "_key", "_recorder", "_site", "_start", "_state")

    def __init__(self, recorder: Recorder, site: int, state: TorchState, key: int) -> None:
        self._recorder = recorder
        self._key = key
        self._site = site
        self._state = state
        self._buffer: StepBuffer | None = None
        self._start = -1

    def __enter__(self) -> None:
        if self._state.compiling():
            if self._state.traced_mark is not None:
                self._state.traced_mark(self._key, self._site, begins=True)
            return
        buffer = self._recorder.buffer
        if buffer is None:
            return
        try:
            self._start = buffer.mark()
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._recorder.record_failed(error)
            return
        self._buffer = buffer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state.compiling():
            if self._state.traced_mark is not None:
                self._state.traced_mark(self._key, self._site, begins=False)
            return
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            flags = self._state.flags() if error is None else self._state.error_flags(error)
            close_interval(buffer, self._recorder, self._site, self._start, flags)
