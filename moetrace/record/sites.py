"""Call sites: what a wrapped callable is, so that an interval needs to carry only a number."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from moetrace_schemas.enums import Phase

STEP_LEVEL = -1
"""Layer number of what belongs to no MoE layer."""


class Role(Enum):
    """What the time inside a wrapped callable means."""

    LAYER = "layer"
    """A whole MoE block: its own time, between its parts, is glue."""
    EXPERTS = "experts"
    """The experts' call: one phase, or three where its GEMMs are wrapped too (before, GEMMs, after)."""
    PHASE = "phase"
    """One phase."""
    EXCHANGE = "exchange"
    """A collective that moves rows: a barrier of the expert-parallel group."""
    LAUNCH = "launch"
    """Local work around an exchange that has not ended yet; made while assembling, never wrapped."""
    WAIT = "wait"
    """The wait for an exchange that returned at launch."""


@dataclass(frozen=True, slots=True)
class Site:
    """One wrapped callable. `layer` None: that of the enclosing site."""

    role: Role
    phase: Phase | None = None
    """The phase (PHASE), or what EXPERTS is called when it cannot be split."""
    layer: int | None = None
    name: str = ""
    """Where it is, for the coverage report: `model.layers.0.mlp.gate.forward`."""
    per_step: bool = True
    """Whether it is expected to fire in every step (coverage)."""
    alone: bool = False
    """Where no site encloses it, it counts at step level; without this, it is then none of ours."""


class SiteTable:
    """Sites of one tracer by number. Grows while instrumenting, is only read afterwards."""

    def __init__(self) -> None:
        self.sites: list[Site] = []

    def add(self, site: Site) -> int:
        """Register a site; returns its number."""
        self.sites.append(site)
        return len(self.sites) - 1
