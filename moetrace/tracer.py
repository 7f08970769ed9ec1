"""The tracer: opens and closes steps, hands buffers over, owns the drain thread and the emitters.

One per process. What runs on the model's thread is here and in `moetrace.instrument.wrap`; all else
is elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.emit.drain import Drain
from moetrace.errors import ConfigError
from moetrace.guard import Guard
from moetrace.instrument.patches import MARK
from moetrace.instrument.wrap import timed
from moetrace.record.buffer import BufferPool, StepBuffer
from moetrace.record.sites import Role, Site, SiteTable
from moetrace.self_metrics import SelfMetrics
from moetrace.timing.clock import Clock, HostClock
from moetrace_schemas.enums import DropReason, ForwardMode, Phase
from moetrace_schemas.identity import is_sampled

if TYPE_CHECKING:
    from moetrace.emit.base import Emitter
    from moetrace.instrument.coverage import CoverageReport
    from moetrace.instrument.routing import CountSite

_WRAPPABLE: dict[str, tuple[Role, Phase]] = {
    "router": (Role.PHASE, Phase.ROUTER),
    "permute": (Role.PHASE, Phase.PERMUTE),
    "dispatch": (Role.PHASE, Phase.DISPATCH),
    "experts": (Role.EXPERTS, Phase.EXPERT_GEMM),
    "combine": (Role.PHASE, Phase.COMBINE),
    "unpermute": (Role.PHASE, Phase.UNPERMUTE),
    "shared_expert": (Role.PHASE, Phase.SHARED_EXPERT),
}
"""Arguments of `Tracer.wrap`."""


class Tracer:
    """Records sampled steps of this rank. See `moetrace.init`."""

    def __init__(
        self, config: Config, context: RankContext, emitters: list[Emitter], clock: Clock | None = None
    ) -> None:
        self.config = config
        self.context = context
        self.buffer: StepBuffer | None = None
        self.metrics = SelfMetrics()
        self.guard = Guard()
        self.sites = SiteTable()
        self.count_sites: list[CountSite] = []
        self._clock = clock
        self._pool: BufferPool | None = None
        self._model_name = config.model_name
        self._next_step = 0
        self._steps_begun = 0
        self._in_step = False
        self._placement_version = 0
        self._phase_sites: dict[tuple[Phase, int | None], int] = {}
        self._installer: Any = None
        self._device: Any = None
        self._closed = False
        self.drain = Drain(self, emitters)
        if clock is not None or config.clock != "auto":
            self._ensure_pool(None)
        _after_fork_disable(self)

    # --- instrumenting ---------------------------------------------------------------------

    def instrument(self, model: Any, *, strict: bool = False) -> CoverageReport:
        """Wrap the MoE layers of a model; see `moetrace.instrument`."""
        report: CoverageReport = self._installer_of().install(model, strict=strict)
        if report and not self._model_name:
            self._model_name = type(model).__name__
        self.metrics.expected_sites = sum(site.per_step for site in self.sites.sites)
        return report

    def uninstrument(self, model: Any | None = None) -> None:
        """Put the very same callables back, of one model or of all."""
        if self._installer is not None:
            self._installer.uninstall(model)

    def _installer_of(self) -> Any:
        if self._installer is None:
            from moetrace.instrument.install import Installer

            self._installer = Installer(self)
        return self._installer

    def wrap(
        self, *, layer: int | None = None, num_experts: int | None = None, **callables: Callable[..., Any]
    ) -> SimpleNamespace:
        """Wrap hand-written MoE code: returns the wrapped callables under the names they came with.

        Args:
            layer: MoE layer index of these callables.
            num_experts: experts of the layer; with it, integer ids in the router's result are counted.
            callables: any of router, permute, dispatch, experts, combine, unpermute, shared_expert.
                A torch module is wrapped in place (its forward) and returned.

        Raises:
            ConfigError: an unknown name, or a value that is not callable.
        """
        from moetrace.instrument import install as installing

        if layer is not None and not 0 <= layer <= 32767:
            raise ConfigError(f"layer={layer}: 0 to 32767 expected")
        installer = self._installer_of()
        if "torch" in __import__("sys").modules:
            installer.hook_collectives()
        result = SimpleNamespace()
        for name, function in callables.items():
            if name not in _WRAPPABLE:
                raise ConfigError(f"wrap({name}=...): no such part; known: {', '.join(_WRAPPABLE)}")
            if not callable(function):
                raise ConfigError(f"wrap({name}={function!r}): a callable expected")
            role, phase = _WRAPPABLE[name]
            site = self.sites.add(Site(role, phase, layer, f"wrap.{name}[{layer}]"))
            observe = None
            if name == "router" and num_experts is not None:
                observe = self._count_observer(installing, layer or 0, num_experts)
            setattr(result, name, self._wrap_one(function, site, observe))
        self.metrics.expected_sites = sum(site.per_step for site in self.sites.sites)
        return result

    def _wrap_one(self, function: Callable[..., Any], site: int, observe: Any) -> Any:
        failed = self.guard_stage("counts")
        if hasattr(function, "forward") and hasattr(function, "named_modules"):
            module: Any = function
            module.forward = timed(module.forward, self, site, observe=observe, failed=failed)
            return module
        return timed(function, self, site, observe=observe, failed=failed)

    def _count_observer(self, installing: Any, layer: int, num_experts: int) -> Any:
        import torch

        from moetrace.instrument.routing import CountSite

        sites = [*self.count_sites, CountSite(layer, num_experts)]
        self.set_count_sites(sites, self._device or torch.device("cpu"))
        return installing._route_observer(len(sites) - 1)

    def guard_stage(self, stage: str) -> Callable[[BaseException], None]:
        """A function that counts a failure of `stage`."""
        return functools.partial(self.guard.caught, stage)

    def set_expert_parallel(self, ep_rank: int, ep_size: int, ep_group: int) -> None:
        """Take the position in the expert-parallel group from the model."""
        self.context = replace(self.context, ep_rank=ep_rank, ep_size=ep_size, ep_group=ep_group)

    def set_count_sites(self, sites: list[CountSite], device: Any) -> None:
        """Layers to count, and where their router runs; allocates the counters of every buffer."""
        from moetrace.instrument.routing import StepCounter

        self.count_sites = sites
        self._device = device
        for buffer in self._ensure_pool(device).all_buffers:
            buffer.counter = StepCounter(sites, device)

    def _ensure_pool(self, device: Any) -> BufferPool:
        if self._pool is None:
            if self._clock is None:
                wants_cuda = self.config.clock == "cuda" or (
                    self.config.clock == "auto" and getattr(device, "type", "cpu") == "cuda"
                )
                if wants_cuda:
                    from moetrace.timing.cuda_events import CudaClock

                    self._clock = CudaClock()
                else:
                    self._clock = HostClock()
            self._pool = BufferPool(self._clock, self.config.buffers, self.config.max_intervals)
            self.drain.start(self._pool)
        return self._pool

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
        step: int | None,
        forward_mode: ForwardMode | str | None,
        microbatch: int,
        cohort: str,
        warmup: bool | None,
    ) -> None:
        """Open a step; a step that is still open is dropped and counted."""
        number = self._next_step if step is None else step
        self._next_step = number + 1
        begun = self._steps_begun
        self._steps_begun = begun + 1
        if self.buffer is not None:
            self._drop_open(DropReason.STEP_ABORTED)
        self._in_step = True
        if self._closed or not is_sampled(self.context.run_id, number, self.config.sample_period):
            self.metrics.steps_not_sampled += 1
            return
        pool = self._ensure_pool(self._device)
        self.metrics.steps_sampled += 1
        buffer = pool.acquire()
        if buffer is None:
            self.metrics.drop(DropReason.BUFFER_POOL_EMPTY)
            return
        buffer.begin(
            number,
            microbatch=microbatch,
            forward_mode=self.config.forward_mode if forward_mode is None else ForwardMode(forward_mode),
            cohort=cohort if cohort in self.config.cohorts else "",
            warmup=begun < self.config.warmup_steps if warmup is None else warmup,
            placement_version=self._placement_version,
            start_unix_ns=time.time_ns(),
        )
        if buffer.counter is not None:
            buffer.counter.clear()
        buffer.start_mark = buffer.mark()
        self.buffer = buffer

    def end_step(self) -> None:
        """Close the open step and hand it to the drain thread."""
        self._in_step = False
        buffer = self.buffer
        if buffer is None:
            return
        self.buffer = None
        buffer.end_mark = buffer.mark()
        if buffer.counter is not None:
            buffer.counter.finish()
        if self._pool is not None:
            self._pool.hand_over(buffer)

    def _drop_open(self, reason: DropReason) -> None:
        buffer, self.buffer = self.buffer, None
        self.metrics.drop(reason)
        if buffer is not None and self._pool is not None:
            self._pool.release(buffer)

    def top_forward(self, forward: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        """Wraps a model's forward: notes padding, and is a step of its own where none is open."""

        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._in_step:
                buffer = self.buffer
                if buffer is not None and buffer.counter is not None:
                    self.guard.run("padding", _note_padding, buffer, args, kwargs, mask_at)
                return forward(*args, **kwargs)
            if self._closed:
                return forward(*args, **kwargs)
            self._safe_begin()
            try:
                buffer = self.buffer
                if buffer is not None and buffer.counter is not None:
                    self.guard.run("padding", _note_padding, buffer, args, kwargs, mask_at)
                return forward(*args, **kwargs)
            finally:
                self.guard.run("step", self.end_step)

        setattr(wrapper, MARK, forward)
        return wrapper

    def _safe_begin(self) -> None:
        self.guard.run("step", self.begin_step, None, None, 0, "", None)

    @contextlib.contextmanager
    def phase(self, phase: Phase | str, *, layer: int | None = None) -> Iterator[None]:
        """One phase of hand-written code as a context manager: `with tracer.phase("dispatch", layer=3)`.

        Raises:
            ConfigError: no such phase (before the block runs).
        """
        site = self._phase_site(phase, layer)
        buffer = self.buffer
        if buffer is None:
            yield
            return
        start = buffer.mark()
        failed = 0
        try:
            yield
        except BaseException:
            failed = 8  # RowFlag.ERROR
            raise
        finally:
            buffer.add(site, start, buffer.mark(), failed)

    def _phase_site(self, phase: Phase | str, layer: int | None) -> int:
        try:
            key = (Phase(phase), layer)
        except ValueError:
            raise ConfigError(f"phase={phase!r}: one of {', '.join(Phase)} expected") from None
        site = self._phase_sites.get(key)
        if site is None:
            role = Role.EXPERTS if key[0] is Phase.EXPERT_GEMM else Role.PHASE
            site = self.sites.add(Site(role, key[0], layer, f"phase.{key[0]}[{layer}]", per_step=False))
            self._phase_sites[key] = site
        return site

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
        if self._closed:
            return True
        self._closed = True
        if self.buffer is not None:
            self._drop_open(DropReason.STEP_ABORTED)
        self.uninstrument()
        return self.drain.stop(self.config.shutdown_timeout_s if timeout_s is None else timeout_s)

    def disable_in_child(self) -> None:
        """A forked child has no drain thread: it records nothing, and its model runs on untouched."""
        self.buffer = None
        self._closed = True
        self._in_step = False


class StepScope:
    """Context manager of one step. Never raises of its own."""

    __slots__ = ("_arguments", "_tracer")

    def __init__(self, tracer: Tracer, *arguments: Any) -> None:
        self._tracer = tracer
        self._arguments = arguments

    def __enter__(self) -> StepScope:
        try:
            self._tracer.begin_step(*self._arguments)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._tracer.guard.caught("step", error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracer.guard.run("step", self._tracer.end_step)


def _note_padding(buffer: StepBuffer, args: tuple[Any, ...], kwargs: dict[str, Any], mask_at: int) -> None:
    from moetrace.instrument.routing import padding_flags

    mask = kwargs.get("attention_mask")
    if mask is None and 0 <= mask_at < len(args):
        mask = args[mask_at]
    if mask is not None and hasattr(mask, "dim") and mask.dim() == 2:
        tokens = kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs.get("inputs_embeds", args[0] if args else None)
        # With a key-value cache the mask also covers the past; only the last tokens run now.
        if tokens is not None and tokens.dim() >= 2 and tokens.shape[1] < mask.shape[1]:
            mask = mask[:, -tokens.shape[1] :]
        buffer.counter.padding = padding_flags(mask)
    else:
        buffer.counter.padding = None


_alive: weakref.WeakSet[Tracer] = weakref.WeakSet()


def _after_fork_disable(tracer: Tracer) -> None:
    _alive.add(tracer)


def _disable_all_in_child() -> None:
    for tracer in list(_alive):
        tracer.disable_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disable_all_in_child)
