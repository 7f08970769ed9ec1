"""Turns what adapters found into wrapped callables, and takes it all back."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetrace.adapters.base import Adapter, Call, LayerMatch, Target
from moetrace.errors import UnsupportedModelError
from moetrace.instrument.coverage import CoverageReport, LayerCoverage
from moetrace.instrument.patches import MARK, Patches, is_wrapped
from moetrace.instrument.wrap import Observer, timed, timed_launch, timed_wait
from moetrace.record.buffer import StepBuffer
from moetrace.record.sites import Role, Site
from moetrace_schemas.enums import CountKind, Phase

if TYPE_CHECKING:
    from moetrace.instrument.routing import CountSite
    from moetrace.tracer import Tracer

ADAPTERS = (
    ("moetrace.adapters.transformers", "TransformersAdapter"),
    ("moetrace.adapters.reference", "ReferenceAdapter"),
)
"""In order of preference; the first that finds layers in a model wins for those layers."""


@dataclass(slots=True)
class Instrumented:
    """Everything that `uninstrument` must undo for one model."""

    model: Any
    patches: Patches
    report: CoverageReport


class Installer:
    """Wraps models for one tracer. Called by the user's thread, never while a step is recorded."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._shared = Patches()
        self._shared_keys: set[tuple[int, str]] = set()
        self.installed: list[Instrumented] = []

    def install(self, model: Any, *, strict: bool) -> CoverageReport:
        """Find MoE layers and wrap them; a model that is instrumented already is left as it is.

        Raises:
            UnsupportedModelError: no MoE layer was found and `strict` is set.
        """
        for entry in self.installed:
            if entry.model is model:
                return entry.report
        adapters = [_load(module, name) for module, name in ADAPTERS]
        matches: dict[str, LayerMatch] = {}
        skipped: list[tuple[str, str]] = []
        for adapter in adapters:
            found = adapter.match(model)
            for match in found.layers:
                matches.setdefault(match.path, match)
            skipped.extend(found.skipped)
        if not matches:
            report = CoverageReport(skipped=tuple(skipped), looked_for=tuple(a.looks_for for a in adapters))
            if strict:
                raise UnsupportedModelError(str(report))
            return report
        return self._wrap_all(model, list(matches.values()), skipped)

    def _wrap_all(
        self, model: Any, matches: list[LayerMatch], skipped: list[tuple[str, str]]
    ) -> CoverageReport:
        from moetrace.instrument.routing import CountSite

        patches = Patches()
        count_sites: list[CountSite] = list(self._tracer.count_sites)
        for match in matches:
            routed = received = -1
            if match.num_experts:
                routed = len(count_sites)
                count_sites.append(CountSite(match.layer, match.num_experts))
                if match.parallel is not None:
                    received = len(count_sites)
                    first = match.parallel.rank * match.num_local_experts
                    count_sites.append(CountSite(match.layer, match.num_experts, CountKind.RECEIVED, first))
            for target in match.targets:
                try:
                    self._wrap(patches, match, target, routed, received)
                except (AttributeError, TypeError) as error:
                    skipped.append((target.name, f"cannot be wrapped: {error}"))
        parallel = next((match.parallel for match in matches if match.parallel), None)
        if parallel is not None:
            self._tracer.set_expert_parallel(parallel.rank, parallel.size, parallel.group)
            self.hook_collectives()
        self._wrap_top(patches, model)
        self._tracer.set_count_sites(count_sites, _device_of(model))
        report = CoverageReport(
            layers=tuple(_coverage(match) for match in matches), skipped=tuple(dict.fromkeys(skipped))
        )
        self.installed.append(Instrumented(model, patches, report))
        return report

    def _wrap(self, patches: Patches, match: LayerMatch, target: Target, routed: int, received: int) -> None:
        if target.shared:
            key = (id(target.owner), target.attribute)
            if key in self._shared_keys:
                return
            self._shared_keys.add(key)
            patches = self._shared
        observe: Observer | None = None
        if target.counts_routes and routed >= 0:
            observe = _route_observer(routed)
        elif target.read_dispatch is not None:
            observe = _dispatch_observer(target.read_dispatch, match.layer, received)
        self._place(patches, target, observe)

    def _place(self, patches: Patches, target: Target, observe: Observer | None = None) -> None:
        if target.call is not Call.TIMED and is_wrapped(getattr(target.owner, target.attribute)):
            return
        site = self._tracer.sites.add(
            Site(target.role, target.phase, target.layer, target.name, target.per_step)
        )
        failed = self._tracer.guard_stage("counts")

        def make(current: Callable[..., Any]) -> Callable[..., Any]:
            if target.call is Call.LAUNCH:
                return timed_launch(current, self._tracer, site, _is_pending)
            if target.call is Call.WAIT:
                return timed_wait(current, self._tracer, site)
            return timed(current, self._tracer, site, observe=observe, failed=failed)

        patches.replace(target.owner, target.attribute, make)

    def _wrap_top(self, patches: Patches, model: Any) -> None:
        """The top module's forward: takes the attention mask, and is a step where none is open."""
        tracer = self._tracer
        try:
            names = list(inspect.signature(model.forward).parameters)
        except (TypeError, ValueError):
            names = []
        mask_at = names.index("attention_mask") if "attention_mask" in names else -1

        def make(current: Callable[..., Any]) -> Callable[..., Any]:
            return tracer.top_forward(current, mask_at)

        patches.replace(model, "forward", make)

    def hook_collectives(self) -> None:
        """Wrap torch.distributed's all-to-alls, so that an exchange is told apart from work around it."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return
        functional = importlib.import_module("torch.distributed._functional_collectives")
        owners: list[tuple[Any, str, Call, Role]] = [
            (distributed, "all_to_all_single", Call.TIMED, Role.EXCHANGE),
            (distributed, "all_to_all", Call.TIMED, Role.EXCHANGE),
            (functional, "all_to_all_single", Call.LAUNCH, Role.EXCHANGE),
            (functional, "wait_tensor", Call.WAIT, Role.WAIT),
        ]
        for owner, attribute, call, role in owners:
            key = (id(owner), attribute)
            if key in self._shared_keys or not hasattr(owner, attribute):
                continue
            self._shared_keys.add(key)
            name = f"{owner.__name__}.{attribute}"
            self._place(
                self._shared,
                Target(owner=owner, attribute=attribute, role=role, name=name, call=call, per_step=False),
            )

    def uninstall(self, model: Any | None = None) -> None:
        """Put the very same callables back, of one model or of all."""
        for entry in [e for e in self.installed if model is None or e.model is model]:
            entry.patches.restore()
            self.installed.remove(entry)
        if not self.installed:
            self._shared.restore()
            self._shared_keys.clear()


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


def _is_pending(result: Any) -> bool:
    # AsyncCollectiveTensor: launched, and waited for at its first use.
    return getattr(result, "completed", None) is False


def _route_observer(index: int) -> Observer:
    import torch

    from moetrace.instrument.routing import find_expert_ids, is_recompute

    def observe(buffer: StepBuffer, args: tuple[Any, ...], result: Any) -> None:
        ids = find_expert_ids(result)
        if ids is None or buffer.counter is None:
            return
        if is_recompute(torch._C._current_graph_task_id):
            buffer.counter.add_recompute(index, ids)
        else:
            buffer.counter.add(index, ids)

    return observe


def _dispatch_observer(read: Callable[[Any], Any], layer: int, index: int) -> Observer:
    import torch

    from moetrace.instrument.routing import is_recompute

    def observe(buffer: StepBuffer, args: tuple[Any, ...], result: Any) -> None:
        if is_recompute(torch._C._current_graph_task_id):
            return
        dispatch = read(result)
        if dispatch.received_ids is not None and buffer.counter is not None and index >= 0:
            buffer.counter.add(index, dispatch.received_ids)
        buffer.traffic.append((layer, Phase.DISPATCH, dispatch.row_bytes, dispatch.send_sizes))
        buffer.traffic.append((layer, Phase.COMBINE, dispatch.row_bytes, dispatch.receive_sizes))
        buffer.local_rows.append((layer, dispatch.received_rows))

    return observe


__all__ = ["ADAPTERS", "MARK", "Installer", "Instrumented"]
