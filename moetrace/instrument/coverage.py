"""What was instrumented and what was not, and why: the answer of `instrument`."""

from __future__ import annotations

from dataclasses import dataclass

from moetrace_schemas.enums import Phase
from moetrace_schemas.wording import count


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCoverage:
    """One MoE layer."""

    layer: int
    path: str
    adapter: str
    num_experts: int
    phases: tuple[Phase, ...]
    """Told apart."""
    fused: tuple[Phase, ...]
    """Measured together, reported as `fused`."""
    counted: bool
    """Tokens per expert are counted."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentSite:
    """A wrapped call site that has not fired in any recorded step."""

    name: str
    layer: int | None
    code: str
    """The reason as a word: captured, replaced, compiled, other_thread, wrong_object, other_path,
    layer_not_run or not_called."""
    reason: str
    """The reason as a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageReport:
    """What `instrument` did to a model, and what fired (`Tracer.coverage`). False without a layer."""

    layers: tuple[LayerCoverage, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    """(module path or callable, why it was left alone)."""
    looked_for: tuple[str, ...] = ()
    """What each adapter looks for; shown when nothing was found."""
    recorded_steps: int = 0
    """Recorded steps behind the figures below; 0: none yet."""
    expected_sites: int = 0
    """Wrapped call sites that should fire in every step."""
    silent: tuple[SilentSite, ...] = ()
    """Those of them that have not fired in any recorded step, and why."""
    graph_layers: tuple[int, ...] = ()
    """Layers whose phases are told apart inside captured graphs, where not all are; others show as fused."""

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that every layer tells apart, in the order of a step."""
        return tuple(p for p in Phase if self.layers and all(p in layer.phases for layer in self.layers))

    def __str__(self) -> str:
        if not self.layers:
            lines = ["moetrace: no MoE layer found; looked for:"]
            lines += [f"  - {text}" for text in self.looked_for]
        else:
            counted = sum(layer.counted for layer in self.layers)
            lines = [
                f"moetrace: {count(len(self.layers), 'MoE layer')} "
                f"({', '.join(sorted({layer.adapter for layer in self.layers}))}), "
                f"phases {', '.join(self.phases)}; experts counted in {counted}"
            ]
            fused = sorted({phase for layer in self.layers for phase in layer.fused})
            if fused:
                lines.append(f"  measured together as fused: {', '.join(fused)}")
            lines += [f"  {note}" for note in dict.fromkeys(n for x in self.layers for n in x.notes)]
        if self.graph_layers:
            names = ", ".join(map(str, self.graph_layers))
            lines.append(f"  in captured graphs only layers {names} are told apart, the others are fused")
        lines += [f"  skipped {what}: {why}" for what, why in self.skipped]
        if self.recorded_steps:
            fired = self.expected_sites - len(self.silent)
            sites = count(self.expected_sites, "call site")
            steps = count(self.recorded_steps, "recorded step")
            lines.append(f"  {fired} of {sites} fired in {steps}")
        lines += [f"  silent {site.name}: {site.reason}" for site in self.silent]
        return "\n".join(lines)
