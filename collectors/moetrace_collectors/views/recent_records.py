"""What a live view knows of a run: its newest steps, and the collector's own counters. No logic."""

from __future__ import annotations

from dataclasses import dataclass

from moetrace_collectors.views.run_records import LayerImbalance, LoadMatrix, RankPhaseExtension, StepRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentRun:
    """The newest joined steps of one run."""

    run_id: str
    steps: tuple[StepRow, ...]
    """In step order; empty where nothing has been joined yet."""
    extensions: tuple[RankPhaseExtension, ...]
    """Over these steps."""
    imbalance: tuple[LayerImbalance, ...]
    """Over the newest `load_steps` of them: one step of a large model has millions of counts."""
    expert_loads: tuple[LoadMatrix, ...]
    load_steps: int

    @property
    def world_size(self) -> int:
        """Ranks of the run, by its newest step."""
        return self.steps[-1].world_size if self.steps else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorCounters:
    """A running collector's own counters at one moment."""

    read_monotonic_s: float
    received: int
    joined: int
    late: int
    duplicate: int
    rejected: int
    pending: int
    throttled: int
    lost_rows: int
    sink_errors: int
    verdict_p99_s: float | None
    """Upper bound of the histogram's bucket; infinite beyond the largest, None before the first verdict."""
