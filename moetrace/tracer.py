"""The tracer: opens and closes steps, hands buffers over, owns the drain thread and the emitters.

One per process. What runs on the model's thread is here and in `moetrace.instrument`; all else is
elsewhere.
"""

from __future__ import annotations

import operator
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.emit.drain import Drain
from moetrace.errors import ConfigError
from moetrace.guard import Guard
from moetrace.instrument.cost import interval_cost_ns
from moetrace.instrument.hand_written import check_parts, wrap_parts
from moetrace.instrument.install import Installer
from moetrace.instrument.phases import PhaseScope, phase_site
from moetrace.instrument.steps import StepScope
from moetrace.instrument.wrap import TorchState
from moetrace.record.buffer import BufferPool, StepBuffer
from moetrace.record.sites import SiteTable
from moetrace.self_metrics import SelfMetrics
from moetrace.timing.clock import Clock, HostClock
from moetrace_schemas.enums import DropReason, ForwardMode, Phase
from moetrace_schemas.identity import is_sampled

if TYPE_CHECKING:
    from moetrace.emit.base import Emitter
    from moetrace.instrument.coverage import CoverageReport
    from moetrace.instrument.routing import CountSite, StepCounter

_HIGHEST_STEP = 2**63 - 1
"""The wire's step index is an int64."""
_HIGHEST_MICROBATCH = 65_535
"""The wire's microbatch column is a uint16."""


class Tracer:
    """Records sampled steps of this rank. See `moetrace.init`."""

    def __init__(
        self, config: Config, context: RankContext, emitters: list[Emitter], clock: Clock | None = None
    ) -> None:
        """Start; with a clock that is known from the start, so are the buffers.

        Raises:
            ConfigError: clock="cuda" where no CUDA device can be used.
        """
        self.config = config
        self.context = context
        self.buffer: StepBuffer | None = None
        self.metrics = SelfMetrics()
        self.guard = Guard()
        self.sites = SiteTable()
        self.count_sites: list[CountSite] = []
        self.device: Any = None
        """Where routers run; None until a model or wrapped module says so."""
        self.open_scopes = 0
        self.closed = False
        """Whether nothing is recorded any more."""
        self._clock = clock
        self._pool: BufferPool | None = None
        self._counters: list[StepCounter] = []
        self._model_name = config.model_name
        self._next_step = 0
        self._steps_begun = 0
        self._scope: object | None = None
        self._placement_version = 0
        self._phase_sites: dict[tuple[str, int | None], tuple[int, TorchState]] = {}
        self._installer = Installer(self)
        self.drain = Drain(self, emitters)
        if config.enabled and (clock is not None or config.clock != "auto"):
            self._ensure_pool(None)
        _alive.add(self)

    # --- instrumenting ---------------------------------------------------------------------

    def instrument(self, model: Any, *, strict: bool = False) -> CoverageReport:
        """Wrap the MoE layers of a model; see `moetrace.instrument`."""
        report = self._installer.install(model, strict=strict)
        if report and not self._model_name:
            self._model_name = type(model).__name__
        self._expect_sites()
        return report

    def uninstrument(self, model: Any | None = None) -> None:
        """Put the very same callables back, of one model or of all."""
        self._installer.uninstall(model)
        self._expect_sites()

    def wrap(
        self, *, layer: int | None = None, num_experts: int | None = None, **callables: Callable[..., Any]
    ) -> SimpleNamespace:
        """Wrap hand-written MoE code: returns the wrapped callables under the names they came with.

        Args:
            layer: MoE layer index of these callables.
            num_experts: experts of the layer; with it, integer ids in the router's result are counted.
            callables: any of router, permute, dispatch, experts, combine, unpermute, shared_expert.
                A torch module is wrapped in place (its forward, until `uninstrument`) and returned.

        Raises:
            ConfigError: an unknown name, a value that is not callable, or a number out of range;
                nothing is wrapped then.
        """
        check_parts(callables, layer, num_experts)
        result = wrap_parts(self._installer, callables, layer, num_experts)
        self._expect_sites()
        return result

    def _expect_sites(self) -> None:
        self.metrics.expected_sites = self._installer.expected_sites()

    def set_expert_parallel(self, ep_rank: int, ep_size: int, ep_group: int) -> None:
        """Take the position in the expert-parallel group from the model."""
        self.context = replace(self.context, ep_rank=ep_rank, ep_size=ep_size, ep_group=ep_group)

    def set_count_sites(self, sites: list[CountSite], device: Any) -> None:
        """Layers to count from the next step on, and where routers run; allocates a counter per buffer."""
        from moetrace.instrument.routing import StepCounter

        self.count_sites = sites
        self.device = device
        # Buffers that wait for the drain thread keep the counter they were filled with.
        self._counters = [StepCounter(sites, device) for _ in self._ensure_pool(device).all_buffers]

    def forget_count_sites(self) -> None:
        """Nothing is counted any more."""
        self.count_sites = []
        self._counters = []

    def _ensure_pool(self, device: Any) -> BufferPool:
        if self._pool is None:
            if self._clock is None:
                on_cuda = self.config.clock == "auto" and getattr(device, "type", "cpu") == "cuda"
                self._clock = _cuda_clock() if on_cuda or self.config.clock == "cuda" else HostClock()
                self.guard.run("cost", self._calibrate, self._clock)
            self._pool = BufferPool(self._clock, self.config.buffers, self.config.max_intervals)
            self.drain.start(self._pool)
        return self._pool

    def _calibrate(self, clock: Clock) -> None:
        self.metrics.interval_cost_ns = interval_cost_ns(clock)

    @property
    def clock_name(self) -> str:
        """What times the phases: host or cuda."""
        return self._clock.name if self._clock is not None else HostClock.name

    @property
    def model_name(self) -> str:
        """Model name as configured, or the class of the first instrumented model."""
        return self._model_name

    # --- the hot path ------------------------------------------------------------------------

    def step(
        self,
        step: int | None = None,
        *,
        forward_mode: ForwardMode | str | None = None,
        microbatch: int = 0,
        cohort: str = "",
        warmup: bool | None = None,
    ) -> StepScope:
        """One step (or one microbatch of it) as a context manager.

        A step that is opened inside another one takes its place: the outer one is dropped and counted,
        and what follows the inner one is not recorded.

        Args:
            step: step number, the same on all ranks; without it, the one after the last.
            forward_mode: train, prefill, decode or mixed; default as configured.
            microbatch: index where a step is recorded in several spans.
            cohort: traffic cohort; only those of the allow-list are kept.
            warmup: marks the step as warm-up; default: by `warmup_steps`.
        """
        return StepScope(self, step, forward_mode, microbatch, cohort, warmup)

    def begin_step(
        self,
        scope: object,
        step: int | None,
        forward_mode: ForwardMode | str | None,
        microbatch: int,
        cohort: str,
        warmup: bool | None,
    ) -> None:
        """Open a step on behalf of `scope`; a step that is still open is dropped and counted.

        Raises:
            ValueError: a number out of range or an unknown forward mode; the step is not recorded.
        """
        begun = self._steps_begun
        self._steps_begun = begun + 1
        self._scope = scope
        if self.buffer is not None:
            self._drop_open(DropReason.STEP_ABORTED)
        number = self._next_step if step is None else operator.index(step)
        if not 0 <= number <= _HIGHEST_STEP:
            raise ValueError(f"step={number}: 0 to {_HIGHEST_STEP} expected")
        self._next_step = number + 1
        recording = not (self.closed or self.guard.is_off("record"))
        if not recording or not is_sampled(self.context.run_id, number, self.config.sample_period):
            self.metrics.steps_not_sampled += 1
            return
        self.metrics.steps_sampled += 1
        buffer = self._ensure_pool(self.device).acquire()
        if buffer is None:
            self.metrics.drop(DropReason.BUFFER_POOL_EMPTY)
            return
        try:
            if not 0 <= microbatch <= _HIGHEST_MICROBATCH:
                raise ValueError(f"microbatch={microbatch}: 0 to {_HIGHEST_MICROBATCH} expected")
            buffer.begin(
                number,
                microbatch=microbatch,
                forward_mode=self.config.forward_mode if forward_mode is None else ForwardMode(forward_mode),
                cohort=cohort if cohort in self.config.cohorts else "",
                warmup=begun < self.config.warmup_steps if warmup is None else bool(warmup),
                placement_version=self._placement_version,
                start_unix_ns=time.time_ns(),
            )
            buffer.counter = self._counters[buffer.number] if self._counters else None
            if buffer.counter is not None:
                buffer.counter.clear()
            buffer.start_mark = buffer.mark()
        except Exception:
            self._release(buffer, DropReason.INTERNAL_ERROR)
            raise
        self.buffer = buffer

    def end_step(self, scope: object) -> None:
        """Close the step that `scope` opened and hand it to the drain thread, if it is still the open one."""
        if scope is not self._scope:
            return
        self._scope = None
        buffer, self.buffer = self.buffer, None
        if buffer is None or self._pool is None:
            return
        try:
            buffer.end_mark = buffer.mark()
            if buffer.counter is not None:
                buffer.counter.finish()
        except Exception:
            self._release(buffer, DropReason.INTERNAL_ERROR)
            raise
        self._pool.hand_over(buffer)

    def _drop_open(self, reason: DropReason) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            self._release(buffer, reason)

    def _release(self, buffer: StepBuffer, reason: DropReason) -> None:
        self.metrics.drop(reason)
        if self._pool is not None:
            self._pool.release(buffer)

    def record_failed(self, error: BaseException) -> None:
        """Count a fault of a clock or buffer; after too many, no step is recorded any more."""
        self.guard.caught("record", error)

    def phase(self, phase: Phase | str, *, layer: int | None = None) -> PhaseScope:
        """One phase of hand-written code as a context manager: `with tracer.phase("dispatch", layer=3)`.

        Without `layer`, it belongs to the layer of the phase or wrapped callable around it, and to the
        step itself (layer -1) where there is none.

        Raises:
            ConfigError: no such phase, or a layer out of range (before the block runs).
        """
        known = self._phase_sites.get((phase, layer))
        if known is None:
            known = self.sites.add(phase_site(phase, layer)), TorchState()
            self._phase_sites[(phase, layer)] = known
        return PhaseScope(self, *known)

    def placement(self, version: int) -> None:
        """The version of the expert placement in force from the next step on; 0 or more."""
        if version < 0:
            raise ConfigError(f"placement version={version}: 0 or more expected")
        self._placement_version = version

    # --- ending ------------------------------------------------------------------------------

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Stop recording, send what is recorded, restore every callable. Returns within the deadline.

        Returns:
            True when everything was delivered; False when something was dropped (and counted).
        """
        if self.closed:
            return True
        self.closed = True
        aborted = self.buffer is not None
        if aborted:
            self._drop_open(DropReason.STEP_ABORTED)
        self.uninstrument()
        delivered = self.drain.stop(self.config.shutdown_timeout_s if timeout_s is None else timeout_s)
        return delivered and not aborted

    def disable_in_child(self) -> None:
        """A forked child has no drain thread: it records nothing, and its model runs on untouched."""
        self.buffer = None
        self.closed = True


def _cuda_clock() -> Clock:
    try:
        import torch
    except ImportError as error:
        raise ConfigError("clock='cuda': torch is not installed") from error
    if not torch.cuda.is_available():
        raise ConfigError("clock='cuda': torch sees no CUDA device here; auto or host expected")
    from moetrace.timing.cuda_events import CudaClock

    return CudaClock()


_alive: weakref.WeakSet[Tracer] = weakref.WeakSet()


def _disable_all_in_child() -> None:
    for tracer in list(_alive):
        tracer.disable_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disable_all_in_child)
