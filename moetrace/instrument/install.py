"""Turns what adapters found into wrapped callables, and takes it all back."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moetrace.adapters import deepep
from moetrace.adapters.base import Adapter, Call, Count, EngineCall, LayerMatch, Target
from moetrace.errors import ConfigError, UnsupportedModelError
from moetrace.guard import Guard
from moetrace.instrument.counted import counted
from moetrace.instrument.coverage import CoverageReport, LayerCoverage
from moetrace.instrument.learn_group import GroupLearner
from moetrace.instrument.patches import Patches, mark_of
from moetrace.instrument.receive_hook import timed_event_wait, timed_receive
from moetrace.instrument.silent_sites import ForwardCalls, PlacedSite
from moetrace.instrument.step_kind import engine_step
from moetrace.instrument.steps import top_forward
from moetrace.instrument.wait_handles import handle_of, tensor_handles, work_handles
from moetrace.instrument.wrap import Observer, timed, timed_launch, timed_wait
from moetrace.record.buffer import StepBuffer
from moetrace.record.count_sites import CountSite
from moetrace.record.sites import Role, Site
from moetrace_schemas.enums import CountKind, Phase

if TYPE_CHECKING:
    from moetrace.tracer import Tracer

logger = logging.getLogger("moetrace")

ADAPTERS = (
    ("moetrace.adapters.megatron", "MegatronAdapter", "megatron.core"),
    ("moetrace.adapters.deepspeed", "DeepSpeedAdapter", "deepspeed"),
    ("moetrace.adapters.fairscale", "FairscaleAdapter", "fairscale"),
    ("moetrace.adapters.torchtitan", "TorchtitanAdapter", "torchtitan"),
    ("moetrace.adapters.olmo_core", "OlmoCoreAdapter", "olmo_core"),
    ("moetrace.adapters.megablocks", "MegaBlocksAdapter", "megablocks"),
    ("moetrace.adapters.tutel", "TutelAdapter", "tutel"),
    ("moetrace.adapters.vllm", "VllmAdapter", "vllm"),
    ("moetrace.adapters.sglang", "SGLangAdapter", "sglang"),
    ("moetrace.adapters.transformers", "TransformersAdapter", ""),
    ("moetrace.adapters.transformers_v4", "TransformersV4Adapter", ""),
    ("moetrace.adapters.reference", "ReferenceAdapter", ""),
)
"""(module, class, framework), in order of preference: the first that finds a layer wins it. An adapter
with a framework is loaded only where that was imported already: a model of it cannot exist otherwise."""


@dataclass(slots=True)
class Instrumented:
    """Everything that `uninstrument` must undo for one model."""

    model: Any
    patches: Patches
    report: CoverageReport
    calls: ForwardCalls


class Installer:
    """Wraps models for one tracer. Called by the user's thread, never while a step is recorded."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.installed: list[Instrumented] = []
        self.hand_written = Patches()
        """Modules given to `wrap`."""
        self._shared = Patches()
        """Functions of frameworks: one wrapper serves all models."""
        self._shared_keys: set[tuple[int, str]] = set()
        self._not_wrapped: dict[str, str] = {}
        """Shared functions by name, and why they are left alone."""
        self._nvtx: Any = None
        """Push and pop, or why there are none; None before anybody asked."""
        self.learner = GroupLearner(tracer)
        self.loose_sites: list[int] = []
        """Functions that `wrap` has returned wrapped: they stay so."""

    def expected_sites(self) -> frozenset[int]:
        """Numbers of the wrapped callables that should fire in every step."""
        placed = [self._shared, self.hand_written, *(entry.patches for entry in self.installed)]
        numbers = [*self.loose_sites, *(number for patches in placed for number in patches.sites)]
        return frozenset(number for number in numbers if self.tracer.sites.sites[number].per_step)

    def placed_sites(self) -> dict[int, PlacedSite]:
        """Where the wrapper of each site is, by its number."""
        found = {
            number: PlacedSite(owner, attribute)
            for patches in (self._shared, self.hand_written)
            for number, (owner, attribute) in patches.sites.items()
        }
        for entry in self.installed:
            for number, (owner, attribute) in entry.patches.sites.items():
                found[number] = PlacedSite(owner, attribute, entry.model, entry.calls)
        return found

    def install(self, model: Any, *, strict: bool) -> CoverageReport:
        """Find MoE layers and wrap them; a model that is instrumented already is left as it is.

        Raises:
            ConfigError: not a torch module.
            UnsupportedModelError: no MoE layer was found and `strict` is set.
        """
        if not hasattr(model, "named_modules"):
            raise ConfigError(f"instrument({type(model).__name__}): a torch.nn.Module expected")
        for entry in self.installed:
            if entry.model is model:
                return entry.report
        adapters = [_load(module, name) for module, name, framework in ADAPTERS if _imported(framework)]
        matches: dict[str, LayerMatch] = {}
        skipped: list[tuple[str, str]] = []
        engine_calls: list[EngineCall] = []
        for adapter in adapters:
            found = adapter.match(model)
            taken = list(matches)
            for match in found.layers:
                # One adapter may know a block, and another one its experts.
                if not any(_overlap(match.path, path) for path in taken):
                    matches[match.path] = match
            skipped.extend(found.skipped)
            engine_calls += found.engine_calls
        for match in [m for m in matches.values() if _is_installed(m)]:
            skipped.append((match.path, "already instrumented, as part of another model"))
            del matches[match.path]
        if not matches:
            report = CoverageReport(skipped=tuple(skipped), looked_for=tuple(a.looks_for for a in adapters))
            if strict:
                raise UnsupportedModelError(str(report))
            return report
        patches, calls = Patches(), ForwardCalls()
        try:
            self._wrap_engine(engine_calls)
            report = self._wrap_all(patches, model, self._numbered_apart(matches.values()), skipped)
            self._wrap_top(patches, model, calls)
        except BaseException:
            patches.restore()
            if not self.loose_sites:
                self._leave_shared()
            raise
        self.installed.append(Instrumented(model, patches, report, calls))
        self.tracer.kind.models.add(model)
        return report

    def _wrap_engine(self, calls: Iterable[EngineCall]) -> None:
        for call in calls:
            key = (id(call.owner), call.attribute)
            if key not in self._shared_keys:
                self._shared_keys.add(key)
                make = functools.partial(engine_step, owner=self.tracer, call=call)
                self._shared.replace(call.owner, call.attribute, make)

    def _numbered_apart(self, matches: Iterable[LayerMatch]) -> list[LayerMatch]:
        """Layers of one model, behind those of the models before it where they would share numbers.

        A draft model beside the one that it drafts for would else add to the same layers.
        """
        found = list(matches)
        taken = {layer.layer for entry in self.installed for layer in entry.report.layers}
        if not any(match.layer in taken for match in found):
            return found
        first = max(taken) + 1
        note = f"another instrumented model has the same layer numbers: these layers count from {first}"
        return [_with_number(match, first + match.layer, note) for match in found]

    def _wrap_all(
        self, patches: Patches, model: Any, matches: list[LayerMatch], skipped: list[tuple[str, str]]
    ) -> CoverageReport:
        from moetrace.instrument import compiled

        count_sites: list[CountSite] = list(self.tracer.count_sites)
        for match in matches:
            rows: dict[CountKind, int] = {}
            first = match.parallel.rank * match.num_local_experts if match.parallel is not None else 0
            for kind in _count_kinds(match):
                rows[kind] = len(count_sites)
                count_sites.append(_count_site(match, kind, first))
            for target in match.targets:
                try:
                    self._wrap(patches, match, target, rows)
                except (AttributeError, TypeError, ValueError) as error:
                    skipped.append((target.name, f"cannot be wrapped: {error}"))
        parallel = next((match.parallel for match in matches if match.parallel), None)
        if parallel is not None:
            self.tracer.set_expert_parallel(parallel.rank, parallel.size, parallel.group)
            self.hook_collectives()
            skipped.extend(self._not_wrapped.items())
        self.tracer.set_count_sites(count_sites, _device_of(model))
        if isinstance(self._nvtx, str):
            skipped.append(("nvtx ranges", self._nvtx))
        if not self.tracer.config.compiled:
            skipped.append(("compiled graphs", "switched off (compiled=False): nothing is recorded there"))
        elif not compiled.AVAILABLE:
            skipped.append(
                ("compiled graphs", "this torch keeps no marks in them: nothing is recorded there")
            )
        return CoverageReport(
            layers=tuple(_coverage(match) for match in matches), skipped=tuple(dict.fromkeys(skipped))
        )

    def _wrap(self, patches: Patches, match: LayerMatch, target: Target, rows: dict[CountKind, int]) -> None:
        if target.shared:
            key = (id(target.owner), target.attribute)
            if key in self._shared_keys:
                return
            self._shared_keys.add(key)
            patches = self._shared
        if target.count is not None:
            if target.count_kind in rows:
                self._place_count(patches, target, target.count, rows[target.count_kind])
            return
        observe: Observer | None = None
        if target.counts_routes and CountKind.ROUTED in rows:
            observe = _RouteObserver(rows[CountKind.ROUTED], self.tracer.guard)
        elif target.read_dispatch is not None:
            received = rows.get(CountKind.RECEIVED, -1)
            observe = _dispatch_observer(target.read_dispatch, match.layer, received, self.tracer.guard)
        self._place(patches, target, observe)

    def _place(self, patches: Patches, target: Target, observe: Observer | None = None) -> None:
        if mark_of(getattr(target.owner, target.attribute)):
            # The same function under another module's name.
            return
        tracer = self.tracer
        site = tracer.sites.add(Site(target.role, target.phase, target.layer, target.name, target.per_step))

        def make(current: Callable[..., Any]) -> Callable[..., Any]:
            if target.call is Call.RECEIVE and tracer.config.wait_stats:
                from moetrace.instrument.wait_stats import with_wait_stats

                current = with_wait_stats(current, tracer)
            if target.call is Call.LAUNCH:
                current = self.learner.beside(current)
            current = self.with_range(current, site)
            if target.call is Call.LAUNCH:
                return timed_launch(current, tracer, site, handle_of)
            if target.call is Call.RECEIVE:
                waited = Site(Role.WAIT, name=f"{target.name}.hook", per_step=False)
                return timed_receive(current, tracer, site, tracer.sites.add(waited), tracer.sites.sites)
            if target.call is Call.WAIT_EVENT:
                return timed_event_wait(current, tracer, site)
            if target.call is Call.WAIT:
                return timed_wait(current, tracer, site, tensor_handles, guess=True)
            if target.call is Call.WAIT_WORK:
                return timed_wait(current, tracer, site, work_handles, guess=False)
            return timed(current, tracer, site, observe=observe)

        patches.replace(target.owner, target.attribute, make)
        patches.sites[site] = (target.owner, target.attribute)

    def with_range(self, function: Callable[..., Any], number: int) -> Callable[..., Any]:
        """The callable with its launches named to profilers, where that was asked for and can be had."""
        config, site = self.tracer.config, self.tracer.sites.sites[number]
        if config.kernels:
            from moetrace.instrument.cupti_source import LaunchIds
            from moetrace.instrument.nvtx import ranged

            ids = LaunchIds(number)
            function = ranged(function, site.name, ids.push, ids.pop)
        if config.nvtx:
            from moetrace.instrument.nvtx import label_of, nvtx_functions, ranged

            if self._nvtx is None:
                self._nvtx = nvtx_functions()
            if not isinstance(self._nvtx, str):
                function = ranged(function, label_of(site), *self._nvtx)
        return function

    def _place_count(self, patches: Patches, target: Target, count: Count, index: int) -> None:
        # Pairs by physical expert are the routed ones once more: recompute is noted with those.
        others = (CountKind.RECEIVED, CountKind.EXECUTED, CountKind.PHYSICAL)
        source_side = target.count_kind not in others

        def make(current: Callable[..., Any]) -> Callable[..., Any]:
            return counted(current, self.tracer, count, index, source_side=source_side)

        patches.replace(target.owner, target.attribute, make)

    def _wrap_top(self, patches: Patches, model: Any, calls: ForwardCalls) -> None:
        """The top module's forward: takes the attention mask, and is a step where none is open."""
        try:
            names = list(inspect.signature(model.forward).parameters)
        except (TypeError, ValueError):
            names = []
        mask_at = names.index("attention_mask") if "attention_mask" in names else -1
        patches.replace(
            model, "forward", lambda current: top_forward(self.tracer, model, current, mask_at, calls)
        )

    def count_routes(self, layer: int, num_experts: int, device: Any) -> Observer:
        """Count the expert ids in a router's result from now on; returns what looks at it."""
        import torch

        sites = [*self.tracer.count_sites, CountSite(layer, num_experts)]
        index = len(sites) - 1
        sites.append(CountSite(layer, num_experts, CountKind.RECEIVED, at_exchange=True))
        self.tracer.set_count_sites(sites, device or self.tracer.device or torch.device("cpu"))
        return _RouteObserver(index, self.tracer.guard)

    def hook_collectives(self) -> None:
        """Wrap torch.distributed's all-to-alls, so that an exchange is told apart from work around it."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return
        functional = importlib.import_module("torch.distributed._functional_collectives")
        owners: list[tuple[Any, str, Call, Role]] = [
            (distributed, "all_to_all_single", Call.LAUNCH, Role.EXCHANGE),
            (distributed, "all_to_all", Call.LAUNCH, Role.EXCHANGE),
            (distributed.Work, "wait", Call.WAIT_WORK, Role.WAIT),
            (functional, "all_to_all_single", Call.LAUNCH, Role.EXCHANGE),
            (functional, "wait_tensor", Call.WAIT, Role.WAIT),
        ]
        for owner, attribute, call, role in owners:
            if not hasattr(owner, attribute):
                continue
            name = f"{owner.__name__}.{attribute}"
            self._place_shared(
                Target(owner=owner, attribute=attribute, role=role, name=name, call=call, per_step=False)
            )
        for target in deepep.exchanges():
            self._place_shared(target)

    def _place_shared(self, target: Target) -> None:
        key = (id(target.owner), target.attribute)
        if key in self._shared_keys:
            return
        self._shared_keys.add(key)
        try:
            self._place(self._shared, target)
        except (AttributeError, TypeError, ValueError) as error:
            logger.warning("moetrace: %s cannot be wrapped: %s", target.name, error)
            self._not_wrapped[target.name] = f"cannot be wrapped: {error}"

    def uninstall(self, model: Any | None = None) -> None:
        """Put the very same callables back, of one model or of all."""
        for entry in [e for e in self.installed if model is None or e.model is model]:
            entry.patches.restore()
            self.installed.remove(entry)
            self.tracer.kind.models.discard(entry.model)
        if model is None:
            self.hand_written.restore()
        self._leave_shared()

    def _leave_shared(self) -> None:
        """Put callables of frameworks back, once nothing is instrumented that needs them."""
        if self.installed or len(self.hand_written):
            return
        self._shared.restore()
        self._shared_keys.clear()
        if not self.loose_sites:
            self.tracer.forget_count_sites()


def _with_number(match: LayerMatch, layer: int, note: str) -> LayerMatch:
    targets = (t if t.layer is None else replace(t, layer=layer) for t in match.targets)
    return replace(match, layer=layer, targets=tuple(targets), notes=(*match.notes, note))


def _count_site(match: LayerMatch, kind: CountKind, first: int) -> CountSite:
    """One kind of count of a layer; `first` is the first expert of this rank."""
    if kind is CountKind.ROUTED:
        return CountSite(
            match.layer,
            match.num_experts,
            weight_sums=match.weight_sums,
            slots=match.slots,
            sentinels=match.sentinels,
            ep_size=match.parallel.size if match.parallel is not None else 1,
            exact_rows=match.exact_rows,
        )
    if kind is CountKind.RECEIVED and not _shows_received(match):
        # What an exchange says is of slots: with replicas, not of the layer's experts in order.
        return CountSite(match.layer, match.num_experts, kind, at_exchange=not match.num_physical)
    if kind is CountKind.PHYSICAL:
        return CountSite(match.layer, match.num_physical, kind, sentinels=match.sentinels)
    here = kind is CountKind.RECEIVED or (kind is CountKind.EXECUTED and match.parallel is not None)
    local = (first, match.num_local_experts) if here and not match.received_logical else (0, 0)
    return CountSite(match.layer, match.num_experts, kind, *local)


def _shows_received(match: LayerMatch) -> bool:
    return any(
        target.count_kind is CountKind.RECEIVED or target.read_dispatch is not None
        for target in match.targets
    )


def _count_kinds(match: LayerMatch) -> list[CountKind]:
    """Kinds of counts of one layer; none where the number of experts is not known."""
    if not match.num_experts:
        return []
    kinds = {CountKind.ROUTED, *(target.count_kind for target in match.targets)}
    if match.parallel is not None:
        kinds.add(CountKind.RECEIVED)
    if match.executed:
        kinds.add(CountKind.EXECUTED)
    return [kind for kind in CountKind if kind in kinds]


def _overlap(one: str, other: str) -> bool:
    """Whether one module path is the other, or lies within it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.") or not (one and other)


def _imported(framework: str) -> bool:
    return not framework or framework in sys.modules


def _load(module: str, name: str) -> Adapter:
    adapter: Adapter = getattr(importlib.import_module(module), name)()
    return adapter


def _coverage(match: LayerMatch) -> LayerCoverage:
    return LayerCoverage(
        layer=match.layer,
        path=match.path,
        adapter=match.adapter,
        num_experts=match.num_experts,
        phases=match.phases,
        fused=match.fused,
        counted=match.counted and match.num_experts > 0,
        notes=match.notes,
    )


def _device_of(model: Any) -> Any:
    import torch

    parameter = next(model.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")


def _is_installed(match: LayerMatch) -> bool:
    return any(
        mark_of(vars(target.owner).get(target.attribute)) for target in match.targets if not target.shared
    )


class _RouteObserver:
    """Counts the expert ids in a router's result; compiled graphs count them at the same index."""

    def __init__(self, index: int, guard: Guard) -> None:
        import torch

        from moetrace.instrument.routing import find_expert_ids, is_recompute
        from moetrace.instrument.routing_checks import find_weights

        self._index, self._guard = index, guard
        self._find_weights = find_weights
        self._find, self._is_recompute = find_expert_ids, is_recompute
        self._graph_task = torch._C._current_graph_task_id
        self.index_in_graphs = index

    def __call__(self, buffer: StepBuffer, args: tuple[Any, ...], result: Any) -> None:
        self._guard.run("counts", self._count, buffer, result)

    def _count(self, buffer: StepBuffer, result: Any) -> None:
        ids = self._find(result)
        # A model that is instrumented inside a step is counted from the next one on.
        if ids is None or buffer.counter is None or not buffer.counter.counts(self._index):
            return
        if self._is_recompute(self._graph_task):
            buffer.counter.add_recompute(self._index, ids)
            return
        buffer.counter.add(self._index, ids)
        if buffer.counter.checking:
            weights = self._find_weights(result, ids, buffer.counter.sites[self._index].num_experts)
            if weights is not None:
                buffer.counter.check_weights(self._index, weights)


def _dispatch_observer(read: Callable[[Any], Any], layer: int, index: int, guard: Guard) -> Observer:
    import torch

    from moetrace.instrument.routing import is_recompute

    def count(buffer: StepBuffer, result: Any) -> None:
        if is_recompute(torch._C._current_graph_task_id):
            return
        dispatch = read(result)
        if dispatch is None:
            return
        counter = buffer.counter
        if dispatch.received_ids is not None and counter is not None and index >= 0 and counter.counts(index):
            counter.add(index, dispatch.received_ids)
        buffer.traffic.append((layer, Phase.DISPATCH, dispatch.row_bytes, dispatch.send_sizes))
        buffer.traffic.append((layer, Phase.COMBINE, dispatch.row_bytes, dispatch.receive_sizes))
        buffer.local_rows.append((layer, dispatch.received_rows))

    def observe(buffer: StepBuffer, args: tuple[Any, ...], result: Any) -> None:
        guard.run("traffic", count, buffer, result)

    return observe
