"""Small records by hand."""

from __future__ import annotations

from typing import Any

from moetrace.context import RankContext
from moetrace.record.types import ExpertRow, PhaseRow, StepRecord, TrafficRecord
from moetrace_schemas.enums import CountKind, Direction, ForwardMode, Phase

CONTEXT = RankContext(
    run_id="run-7", rank=3, world_size=8, ep_rank=1, ep_size=4, ep_group=2, host_name="node-1"
)


def row(phase: Phase, start: int, duration: int, **more: Any) -> PhaseRow:
    """One phase row of layer 0."""
    fields: dict[str, Any] = {
        "layer": 0,
        "direction": Direction.FORWARD,
        "microbatch": 0,
        "ordinal": 0,
        "stream": 0,
        "flags": 0,
    }
    return PhaseRow(phase=phase, start_offset_ns=start, duration_ns=duration, **{**fields, **more})


def step_record(step: int = 5, **more: Any) -> StepRecord:
    """A step with one layer, its counts and its traffic."""
    fields: dict[str, Any] = {
        "step": step,
        "microbatch": 0,
        "forward_mode": ForwardMode.PREFILL,
        "cohort": "code",
        "warmup": False,
        "placement_version": 2,
        "clock": "host",
        "start_unix_ns": 1_700_000_000_000_000_000,
        "duration_ns": 100_000,
        "phases": (
            row(Phase.OUTSIDE, 0, 40_000),
            row(Phase.DISPATCH, 40_000, 50_000, flags=1, ordinal=1, rows=7, bytes=112),
            row(Phase.OUTSIDE, 90_000, 10_000, layer=-1, direction=Direction.BACKWARD, flags=2),
        ),
        "experts": (
            ExpertRow(layer=0, kind=CountKind.ROUTED, counts=(3, 0, 4)),
            ExpertRow(layer=0, kind=CountKind.INVALID, counts=(1,)),
        ),
        "traffic": (TrafficRecord(layer=0, phase=Phase.DISPATCH, row_bytes=16, rows=(3, 4, 0, 0)),),
    }
    return StepRecord(**{**fields, **more})
