"""What leaves the drain thread: one StepRecord per rank and sampled step. Frozen, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from moetrace_schemas.enums import CountKind, Direction, ForwardMode, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """One phase interval. Times in ns by the phases' own clock; -1 bytes or rows = unknown."""

    layer: int
    phase: Phase
    direction: Direction
    microbatch: int
    ordinal: int
    stream: int
    flags: int
    start_offset_ns: int
    duration_ns: int
    bytes: int = -1
    rows: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRow:
    """Counts per logical expert of one layer and kind."""

    layer: int
    kind: CountKind
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRecord:
    """Rows sent to each expert-parallel rank in one exchange."""

    layer: int
    phase: Phase
    row_bytes: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One rank's sampled step."""

    step: int
    microbatch: int
    forward_mode: ForwardMode
    cohort: str
    warmup: bool
    placement_version: int
    clock: str
    start_unix_ns: int
    duration_ns: int
    phases: tuple[PhaseRow, ...]
    experts: tuple[ExpertRow, ...] = ()
    traffic: tuple[TrafficRecord, ...] = ()
    tracer_ns: int = -1
    """Host time that the tracer took on the model's thread in this step, estimated; -1 = not known."""
    seen_sites: frozenset[int] = field(default_factory=frozenset)
