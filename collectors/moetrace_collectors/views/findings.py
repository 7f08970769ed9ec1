"""What the verdicts of a run say together: the records that every view shows. No logic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from moetrace_collectors.counted_steps import CountedSteps
from moetrace_schemas.enums import Cause, Evidence, Phase


class Incomparable(StrEnum):
    """Why no step of a run can name a rank, however many are recorded."""

    ONE_RANK = "one_rank"
    NO_EXCHANGE = "no_exchange"
    NO_GROUP = "no_group"
    """There are exchanges, of which no rank says whose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unjudged:
    """Why most counted steps have no verdict that could name anyone."""

    reason: str
    """Of the verdicts, a sentence."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One (rank, phase, cause) that verdicts named."""

    rank: int
    phase: Phase
    cause: Cause
    layer: int | None
    """None where no single layer holds half of the worth."""
    steps: int
    clear_steps: int
    steps_share: float
    """steps / counted steps of the run, 0 to 1."""
    worth_total_ns: int
    worth_median_ns: int
    share_median: float
    """Median over its steps of worth / summed extension of the step, 0 to 1."""

    @property
    def ambiguous_steps(self) -> int:
        """Steps that named it with ambiguous evidence."""
        return self.steps - self.clear_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One (rank, phase) over all the causes it was named with; what a headline names."""

    rank: int
    phase: Phase
    layer: int | None
    steps: int
    clear_steps: int
    steps_share: float
    """steps / counted steps of the run, 0 to 1."""
    worth_median_ns: int
    clear_worth_ns: int
    """Worth summed over its steps with clear evidence."""
    causes: tuple[tuple[Cause, int], ...]
    """With the number of steps, most first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run's verdicts in short."""

    headline: str
    """One sentence."""
    remark: str
    """What else was named, in a sentence; empty where nothing was."""
    outstanding: tuple[Place, ...]
    """What the headline names, costliest first; empty where no rank stands out."""
    next_steps: tuple[str, ...]
    counted: CountedSteps
    """Joined steps without warm-up."""
    evidence: Mapping[Evidence, int]
    """Counted steps by evidence; every member is present."""
    partial_steps: int
    """Counted steps with missing ranks."""
    step_median_ns: int
    """Of counted steps that have a length; 0 where none has."""
    step_p95_ns: int
    extension_median_ns: int
    phase_median_ns: Mapping[Phase, int]
    """Median over counted steps of the critical path by phase; phases that never appear are left out."""
    findings: tuple[Finding, ...]
    """By total worth, largest first."""

    @property
    def counted_steps(self) -> int:
        """How many steps were counted."""
        return self.counted.counted

    @property
    def warmup_steps(self) -> int:
        """How many were left out."""
        return self.counted.warmup or 0
