"""The tracer: opens and closes steps, hands buffers over, owns the drain thread and the emitters.

One per process. What runs on the model's thread is here and in `moetrace.instrument`; all else is
elsewhere: wrapping in `instrument.install`, buffers and counters in `instrument.step_buffers`, what fired
and what did not in `instrument.silent_sites`, placements in `record.placement`.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.emit.drain import Drain
from moetrace.guard import Guard
from moetrace.instrument.coverage import CoverageReport
from moetrace.instrument.hand_written import check_parts, wrap_parts
from moetrace.instrument.install import Installer
from moetrace.instrument.phases import PhaseScope, phase_site
from moetrace.instrument.recorders import key_of
from moetrace.instrument.silent_sites import CoverageWatch
from moetrace.instrument.step_buffers import StepBuffers
from moetrace.instrument.step_kind import StepKind, is_due
from moetrace.instrument.steps import StepScope
from moetrace.instrument.torch_state import TorchState, graphs_compiled, learn_torch
from moetrace.record.buffer import StepBuffer
from moetrace.record.placement import make_placement
from moetrace.record.sites import SiteTable
from moetrace.record.types import StepRecord
from moetrace.self_metrics import SelfMetrics
from moetrace_schemas.enums import DropReason, ForwardMode, Phase
from moetrace_schemas.identity import HIGHEST_STEP, is_sampled

if TYPE_CHECKING:
    from moetrace.emit.base import Emitter
    from moetrace.instrument.cupti_source import KernelTrace
    from moetrace.instrument.routing import StepCounter
    from moetrace.record.count_sites import CountSite
    from moetrace.timing.clock import Clock

logger = logging.getLogger("moetrace")
_HIGHEST_MICROBATCH = 65_535
"""The wire's microbatch column is a uint16."""
_FORKED = (
    "this process was forked from one in which moetrace runs, and the threads that send did not come along: "
    "call moetrace.init() here, then instrument() or wrap() again"
)


class Tracer:
    """Records sampled steps of this rank. See `moetrace.init`."""

    def __init__(
        self, config: Config, context: RankContext, emitters: list[Emitter], clock: Clock | None = None
    ) -> None:
        """Start; with a clock that is known from the start, so are the buffers.

        Raises:
            ConfigError: clock="cuda" or "device" where there is no such device.
        """
        self.config = config
        self.context = context
        self.buffer: StepBuffer | None = None
        self.metrics = SelfMetrics()
        self.guard = Guard()
        self.kind = StepKind(config)
        self.sites = SiteTable()
        self.count_sites: list[CountSite] = []
        self.device: Any = None
        """Where routers run; None until a model or wrapped module says so."""
        self.capture: StepBuffer | None = None
        """What wrapped calls record into while a device graph is captured."""
        self.open_scopes = 0
        self._forked = False
        """Whether this is a copy in a forked child, without the threads that drain and send."""
        self.closed = False
        """Whether nothing is recorded any more."""
        self._buffers = StepBuffers(self, clock)
        self._model_name = config.model_name
        self._next_step = 0
        self._steps_begun = 0
        self._has_torch = "torch" in sys.modules
        self._scope: object | None = None
        self._placement_version = 0
        self._phase_sites: dict[tuple[str, int | None], tuple[int, TorchState, int]] = {}
        self._graph_key = key_of(self)
        self._installer = Installer(self)
        self._coverage = CoverageWatch()
        self.drain = Drain(self, emitters, self._look_at)
        if config.enabled and (clock is not None or config.clock != "auto"):
            self._buffers.ready(None)
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
        if "torch" in sys.modules and self._buffers.pool is not None:
            self._buffers.watch_backward(self.device)
        self._expect_sites()
        return result

    def coverage(self) -> CoverageReport:
        """What is instrumented now, and which call sites have not fired in recorded steps so far, and why."""
        return self._coverage.report(
            [entry.report for entry in self._installer.installed], self.sites.sites, self.config.graph_layers
        )

    def _expect_sites(self) -> None:
        # A step that is open began with the set of before: what is wrapped inside it is not missing there.
        self._coverage.expect(self._installer.expected_sites(), self._installer.placed_sites())
        self.metrics.expected_sites = len(self._coverage.expected)

    def _look_at(self, record: StepRecord) -> None:
        """Called by the drain thread with each record."""
        self._coverage.note(record, self.sites.sites)
        for row in record.violations:
            self.metrics.violations[row.violation] += row.count

    def set_expert_parallel(self, ep_rank: int, ep_size: int, ep_group: int) -> None:
        """Take the position in the expert-parallel group from the model."""
        self.context = replace(self.context, ep_rank=ep_rank, ep_size=ep_size, ep_group=ep_group)

    def set_count_sites(self, sites: list[CountSite], device: Any) -> None:
        """Layers to count from the next step on, and where routers run; allocates a counter per buffer."""
        self.count_sites = sites
        self.device = device
        self._buffers.count(sites, device)

    def new_counter(self) -> StepCounter | None:
        """A further counter of all sites, for a captured graph; None where nothing is counted."""
        from moetrace.instrument.routing import StepCounter

        return StepCounter(self.count_sites, self.device) if self.count_sites else None

    def forget_count_sites(self) -> None:
        """Nothing is counted any more."""
        self.count_sites = []
        self._buffers.count_nothing()

    @property
    def clock_name(self) -> str:
        """What times the phases: host, cuda or device."""
        return self._buffers.clock_name

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
        dummy: bool = False,
    ) -> StepScope:
        """One step (or one microbatch of it) as a context manager.

        A step that is opened inside another one takes its place: the outer one is dropped and counted,
        and what follows the inner one is not recorded.

        Args:
            step: step number, the same on all ranks; without it, the one after the last.
            forward_mode: train, prefill, decode or mixed; default as configured, or as the model shows it.
            microbatch: index where a step is recorded in several spans.
            cohort: traffic cohort; only those of the allow-list are kept.
            warmup: marks the step as warm-up; default: by `warmup_steps`.
            dummy: a batch of no request, run so that other ranks have company in their collectives: timed
                as any, but nothing that it routes counts as load. What this rank's experts do for the others
                meanwhile is work like any.
        """
        return StepScope(self, step, forward_mode, microbatch, cohort, warmup, dummy)

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
        """Open a step on behalf of `scope`; a step that is still open is dropped and counted.

        Raises:
            ValueError: a number out of range or an unknown forward mode; the step is not recorded.
        """
        if self.capture is not None:
            # A forward that is captured does not run: it is no step.
            return
        if self._forked:
            if self.config.sample_period > 0:
                self._refuse(DropReason.FORKED, _FORKED)
            return
        if not self._has_torch and "torch" in sys.modules:
            self.guard.run("torch", self._learn_torch)
        begun = self._steps_begun
        self._steps_begun = begun + 1
        self._scope = scope
        dummy = self.kind.is_dummy(dummy)
        if self.buffer is not None:
            self._drop_open(DropReason.STEP_ABORTED)
        number = self._next_step if step is None else operator.index(step)
        recording = not (self.closed or self.guard.is_off("record")) and self.config.sample_period > 0
        if recording and not 0 <= number <= HIGHEST_STEP:
            # No stage's failure: after too many of those, steps with good numbers would go unrecorded too.
            self._refuse(DropReason.STEP_OUT_OF_RANGE, f"step={number}: 0 to {HIGHEST_STEP} expected")
            return
        self._next_step = number + 1
        if not recording or not is_sampled(self.context.run_id, number, self.config.sample_period):
            self.metrics.steps_not_sampled += 1
            return
        self.metrics.steps_sampled += 1
        buffer = self._buffers.ready(self.device).acquire()
        if buffer is None:
            self.metrics.drop(DropReason.BUFFER_POOL_EMPTY)
            return
        try:
            microbatch = operator.index(microbatch)
            if not 0 <= microbatch <= _HIGHEST_MICROBATCH:
                raise ValueError(f"microbatch={microbatch}: 0 to {_HIGHEST_MICROBATCH} expected")
            mode, told = self.kind.mode(forward_mode)
            buffer.begin(
                number,
                microbatch=microbatch,
                forward_mode=mode,
                mode_told=told,
                cohort=cohort if cohort in self.config.cohorts else "",
                warmup=self.kind.is_warmup(warmup, begun),
                placement_version=self._placement_version,
                start_unix_ns=time.time_ns(),
                expected_sites=self._coverage.expected,
            )
            recorded = self.metrics.steps_sampled - 1
            self._buffers.begin_counts(
                buffer,
                checking=is_due(self.config.check_steps, recorded),
                coactivation=is_due(self.config.coactivation_steps, recorded) and not dummy,
                dummy=dummy,
            )
            buffer.compiled_graphs = graphs_compiled()
            buffer.start_mark = buffer.mark()
        except Exception:
            self._release(buffer, DropReason.INTERNAL_ERROR)
            raise
        self.buffer = buffer

    def _learn_torch(self) -> None:
        """Torch was imported after this tracer was made: what wrapping does with torch is done now."""
        learn_torch()
        self._has_torch = True
        if self._installer.has_hand_written and not self.closed:
            self._installer.functions.hook_collectives()
            self._buffers.watch_backward(self.device)

    def end_step(self, scope: object) -> None:
        """Close the step that `scope` opened and hand it to the drain thread, if it is still the open one."""
        if scope is not self._scope:
            return
        self._scope = None
        buffer, self.buffer = self.buffer, None
        pool = self._buffers.pool
        if buffer is None or pool is None:
            return
        try:
            buffer.end_mark = buffer.mark()
            # A step in which something was compiled or tuned is none that anybody wants in a summary.
            buffer.warmup |= buffer.compiled_graphs != graphs_compiled()
            if buffer.counter is not None:
                buffer.counter.finish()
        except Exception:
            self._release(buffer, DropReason.INTERNAL_ERROR)
            raise
        pool.hand_over(buffer)

    def _refuse(self, reason: DropReason, why: str) -> None:
        """Count a step that cannot be recorded; the first is told of."""
        if not self.metrics.dropped[reason]:
            logger.warning("moetrace: %s; such steps are not recorded, and counted as dropped", why)
        self.metrics.steps_sampled += 1
        self.metrics.drop(reason)

    def _drop_open(self, reason: DropReason) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            self._release(buffer, reason)

    def _release(self, buffer: StepBuffer, reason: DropReason) -> None:
        self.metrics.drop(reason)
        if self._buffers.pool is not None:
            self._buffers.pool.release(buffer)

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
            known = self.sites.add(phase_site(phase, layer)), TorchState(), self._graph_key
            self._phase_sites[(phase, layer)] = known
        elif not known[1].has_torch and "torch" in sys.modules:
            self.guard.run("torch", self._learn_torch)
        return PhaseScope(self, *known)

    def kernels(self) -> KernelTrace:
        """A stretch whose kernels are attributed to phases; see `moetrace.instrument.cupti_source`.

        Raises:
            ConfigError: not asked for with kernels=True, or CUPTI cannot be had.
        """
        from moetrace.instrument.cupti_source import kernel_trace

        return kernel_trace(self.sites, wrapped=self.config.kernels)

    def placement(
        self,
        version: int,
        physical_to_logical: object = None,
        *,
        layers: Sequence[int] | None = None,
        num_experts: int | None = None,
        ranks: int | None = None,
        **terms: Any,
    ) -> None:
        """The expert placement in force from the next step on. Call it on all ranks, where it changes.

        With a map, the first rank of each expert-parallel group sends it to the collector's ledger, in the
        background and again until it is taken; the map is copied here, and no device is waited for.

        Args:
            version: 0 or more; another number for every change, a known one for a rollback.
            physical_to_logical: the logical expert in each slot, slots numbered rank by rank: [layers][slots]
                as EPLB, SGLang and vLLM give it (lists, or an array or tensor in host memory), or a
                dictionary layer -> slots, or layer -> {expert: slots}. -1 is an empty slot.
            layers: numbers of the map's layers; default those of the instrumented model where there are as
                many, else 0, 1, ...
            num_experts: logical experts; default the highest one in the map, and one more.
            ranks: expert-parallel ranks; default as known from the model.
            terms: fields of `moetrace_schemas.placement.PlacementTerms`: policy_version, proposed_by, window,
                max_slowdown, max_error_rate, rollback_version, count_ids, expert_bytes, memory_bytes,
                weight_digests.

        Raises:
            ConfigError: a version, map or term that cannot be; nothing is changed then.
        """
        record = make_placement(
            version,
            physical_to_logical,
            step=self._next_step,
            layers=layers,
            num_experts=num_experts,
            ranks=ranks,
            terms=terms,
            known_ranks=self.context.ep_size,
            known_layers=sorted({site.layer for site in self.count_sites}),
        )
        self._placement_version = version
        first = self.context.ep_rank == 0
        if record is not None and first and not self.closed and self.config.sample_period > 0:
            self.drain.placements.append(record)

    # --- ending ------------------------------------------------------------------------------

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Stop recording, send what is recorded, restore every callable. Returns within the deadline.

        Returns:
            True when every recorded step was delivered; False, with one warning that says why, when some
            were dropped at any time.
        """
        if self.closed:
            return True
        self.closed = True
        if self._forked:
            # What is queued is the parent's to send.
            self.uninstrument()
            return not self._tell_losses()
        aborted = self.buffer is not None
        if aborted:
            self._drop_open(DropReason.STEP_ABORTED)
        self.uninstrument()
        delivered = self.drain.stop(self.config.shutdown_timeout_s if timeout_s is None else timeout_s)
        # Last: while the drain thread asks for events, captures must keep it out.
        self._buffers.graph_patches.restore()
        return not self._tell_losses() and delivered and not aborted

    def _tell_losses(self) -> bool:
        """Whether steps were dropped at any time; says so."""
        lost = self.metrics.losses()
        if lost:
            logger.warning("moetrace: %s", lost)
        return bool(lost)

    def disable_in_child(self) -> None:
        """A forked child has no drain thread: it records nothing, tells so, and its model runs on."""
        self.buffer = None
        if not self.closed:
            self._forked = True
            self.metrics.steps_sampled = self.metrics.steps_not_sampled = 0
            self.metrics.dropped.clear()
            self.metrics.exported.clear()


_alive: weakref.WeakSet[Tracer] = weakref.WeakSet()


def _disable_all_in_child() -> None:
    for tracer in list(_alive):
        tracer.disable_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disable_all_in_child)
