"""moetrace about moetrace: what was sampled, exported, dropped and why. Plain integers, no locks.

Counters are written by one thread each (model, drain or export thread) and read by anyone; a torn
read is impossible for a Python int, and a count read a moment late does no harm.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from moetrace_schemas.enums import DropReason, RoutingViolation, SkipReason
from moetrace_schemas.wording import count


@dataclass(slots=True)
class SelfMetrics:
    """Counters of one tracer."""

    steps_sampled: int = 0
    steps_not_sampled: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    dropped_intervals: int = 0
    """Intervals beyond a step's buffer (the step is dropped as buffer_full), or without a stamp because
    a device graph was being captured (the step is kept)."""
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    """Calls without a time of their own, of steps that were kept."""
    exported: Counter[str] = field(default_factory=Counter)
    """Steps that an emitter delivered, by emitter."""
    expected_sites: int = 0
    seen_sites: int = 0
    queue_steps: int = 0
    interval_cost_ns: float = 0.0
    """Host time of one recorded interval on the model's thread, as calibrated; 0.0 = not calibrated."""
    model_thread_ns: int = 0
    """Host time on the model's thread over all recorded steps: intervals x calibrated cost, and counting."""
    background_ns: Counter[str] = field(default_factory=Counter)
    """CPU time of the tracer's own threads so far, by thread: drain, export."""
    spooled_steps: int = 0
    violations: Counter[RoutingViolation] = field(default_factory=Counter)
    """Contradictions in the routing of this rank."""

    def drop(self, reason: DropReason, count: int = 1) -> None:
        """Count dropped steps."""
        self.dropped[reason] += count

    def losses(self) -> str:
        """What was dropped and why, as one sentence; empty where nothing was."""
        if not self.dropped.total():
            return ""
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(self.dropped.items()))
        recorded = count(self.steps_sampled, "recorded step")
        return f"{self.dropped.total():,} of {recorded} not delivered: {reasons}"
