"""Turns what adapters found into wrapped callables, and takes it all back.

Which layers there are is in `find_layers`, what is counted of one in `layer_counts`, which wrapper a callable
gets in `placing`, and what models share in `framework_functions`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetrace.adapters.base import LayerMatch, Target
from moetrace.errors import ConfigError, UnsupportedModelError
from moetrace.instrument.call_observers import RouteObserver, dispatch_observer
from moetrace.instrument.coverage import CoverageReport, LayerCoverage
from moetrace.instrument.find_layers import find_layers, numbered_apart
from moetrace.instrument.framework_functions import FrameworkFunctions
from moetrace.instrument.layer_counts import layer_counts
from moetrace.instrument.patches import Patches
from moetrace.instrument.placing import Placing
from moetrace.instrument.silent_sites import ForwardCalls, PlacedSite
from moetrace.instrument.steps import top_forward
from moetrace.instrument.wrap import Observer
from moetrace.record.count_sites import CountSite
from moetrace_schemas.enums import CountKind

if TYPE_CHECKING:
    from moetrace.tracer import Tracer


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
        self.placing = Placing(tracer)
        self.functions = FrameworkFunctions(tracer, self.placing)
        self.loose_sites: list[int] = []
        """Functions that `wrap` has returned wrapped: they stay so."""

    @property
    def has_hand_written(self) -> bool:
        """Whether something was given to `wrap`."""
        return bool(self.loose_sites) or len(self.hand_written) > 0

    def expected_sites(self) -> frozenset[int]:
        """Numbers of the wrapped callables that should fire in every step."""
        placed = [self.functions.patches, self.hand_written, *(entry.patches for entry in self.installed)]
        numbers = [*self.loose_sites, *(number for patches in placed for number in patches.sites)]
        return frozenset(number for number in numbers if self.tracer.sites.sites[number].per_step)

    def placed_sites(self) -> dict[int, PlacedSite]:
        """Where the wrapper of each site is, by its number."""
        found = {
            number: PlacedSite(owner, attribute)
            for patches in (self.functions.patches, self.hand_written)
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
        found = find_layers(model)
        if not found.layers:
            report = CoverageReport(skipped=tuple(found.skipped), looked_for=found.looked_for)
            if strict:
                raise UnsupportedModelError(str(report))
            return report
        patches, calls = Patches(), ForwardCalls()
        taken = [layer.layer for entry in self.installed for layer in entry.report.layers]
        try:
            self.functions.wrap_engine(found.engine_calls)
            report = self._wrap_all(patches, model, numbered_apart(found.layers, taken), found.skipped)
            self._wrap_top(patches, model, calls)
        except BaseException:
            patches.restore()
            if not self.loose_sites:
                self._leave_shared()
            raise
        self.installed.append(Instrumented(model, patches, report, calls))
        self.tracer.kind.models.add(model)
        return report

    def _wrap_all(
        self, patches: Patches, model: Any, matches: list[LayerMatch], skipped: list[tuple[str, str]]
    ) -> CoverageReport:
        from moetrace.instrument import compiled

        count_sites: list[CountSite] = list(self.tracer.count_sites)
        for match in matches:
            counts = layer_counts(match)
            rows = {site.kind: number for number, site in enumerate(counts, len(count_sites))}
            count_sites += counts
            for target in match.targets:
                try:
                    self._wrap(patches, match, target, rows)
                except (AttributeError, TypeError, ValueError) as error:
                    skipped.append((target.name, f"cannot be wrapped: {error}"))
        parallel = next((match.parallel for match in matches if match.parallel), None)
        if parallel is not None:
            self.tracer.set_expert_parallel(parallel.rank, parallel.size, parallel.group)
            self.functions.hook_collectives()
            skipped.extend(self.functions.not_wrapped.items())
        self.tracer.set_count_sites(count_sites, _device_of(model))
        if isinstance(self.placing.nvtx, str):
            skipped.append(("nvtx ranges", self.placing.nvtx))
        if not self.tracer.config.compiled:
            skipped.append(("compiled graphs", "switched off (compiled=False): nothing is recorded there"))
        else:
            skipped.extend(compiled.LIMITS)
        return CoverageReport(
            layers=tuple(_coverage(match) for match in matches), skipped=tuple(dict.fromkeys(skipped))
        )

    def _wrap(self, patches: Patches, match: LayerMatch, target: Target, rows: dict[CountKind, int]) -> None:
        """Wrap one target; `rows` are the counter's rows of the layer by kind."""
        if target.shared:
            if not self.functions.take(target.owner, target.attribute):
                return
            patches = self.functions.patches
        if target.count is not None:
            if target.count_kind in rows:
                self.placing.place_count(patches, target, target.count, rows[target.count_kind])
            return
        observe: Observer | None = None
        if target.counts_routes and CountKind.ROUTED in rows:
            observe = RouteObserver(rows[CountKind.ROUTED], self.tracer.guard)
        elif target.read_dispatch is not None:
            received = rows.get(CountKind.RECEIVED, -1)
            observe = dispatch_observer(target.read_dispatch, match.layer, received, self.tracer.guard)
        self.placing.place(patches, target, observe)

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
        return RouteObserver(index, self.tracer.guard)

    def uninstall(self, model: Any | None = None) -> None:
        """Put the very same callables back, of one model or of all."""
        for entry in [e for e in self.installed if model is None or e.model is model]:
            entry.patches.restore()
            self.installed.remove(entry)
            self.tracer.kind.models.discard(entry.model)
        if model is None:
            self.hand_written.restore()
        if model is None or not self.loose_sites:
            self._leave_shared()

    def _leave_shared(self) -> None:
        """Put callables of frameworks back, once nothing is instrumented that needs them."""
        if self.installed or len(self.hand_written):
            return
        self.functions.restore()
        if not self.loose_sites:
            self.tracer.forget_count_sites()


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
