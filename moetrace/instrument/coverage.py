"""What was instrumented and what was not, and why: the answer of `instrument`."""

from __future__ import annotations

from dataclasses import dataclass

from moetrace_schemas.enums import Phase


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
class CoverageReport:
    """What `instrument` did to a model. False where no MoE layer was found."""

    layers: tuple[LayerCoverage, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    """(module path or callable, why it was left alone)."""
    looked_for: tuple[str, ...] = ()
    """What each adapter looks for; shown when nothing was found."""

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
                f"moetrace: {len(self.layers)} MoE layers "
                f"({', '.join(sorted({layer.adapter for layer in self.layers}))}), "
                f"phases {', '.join(self.phases)}; experts counted in {counted}"
            ]
            fused = sorted({phase for layer in self.layers for phase in layer.fused})
            if fused:
                lines.append(f"  measured together as fused: {', '.join(fused)}")
            lines += [f"  {note}" for note in dict.fromkeys(n for x in self.layers for n in x.notes)]
        lines += [f"  skipped {what}: {why}" for what, why in self.skipped]
        return "\n".join(lines)
