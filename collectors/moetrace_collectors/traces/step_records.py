"""What a trace shows of one step: its rank steps, its exchanges as they were judged, and its load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moetrace_collectors.model import JoinedStep
from moetrace_collectors.views.run_records import BarrierRow, StepRow
from moetrace_schemas.enums import ForwardMode


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One joined step; counts per expert are not in it."""

    joined: JoinedStep
    row: StepRow
    """Its verdict."""
    barriers: tuple[BarrierRow, ...]
    received_rows: Mapping[int, int]
    """Rows that each rank's experts received, over all layers; ranks that did not say are left out."""
    max_mean_ratio: Mapping[tuple[ForwardMode, int], float]
    """max / mean of pairs per expert, by (forward mode, layer)."""
