"""What leaves the drain thread: one StepRecord per rank and sampled step. Frozen, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moetrace_schemas.enums import (
    CoactivationSpan,
    CountKind,
    Direction,
    ForwardMode,
    Phase,
    RoutingViolation,
)


class PhaseRow(NamedTuple):
    """One phase interval. Times in ns by the phases' own clock; -1 bytes or rows = unknown.

    A tuple, for a step has hundreds: they are made, and laid out as columns, in a fifth of the time.
    """

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
class ViolationRow:
    """What contradicts the routing of one layer, how many times; the unit is that of the violation."""

    layer: int
    violation: RoutingViolation
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoactivationRow:
    """Tokens that two experts share in one layer, or in it and the next MoE layer."""

    layer: int
    span: CoactivationSpan
    pairs: tuple[tuple[int, int, int], ...]
    """(first expert, second expert, tokens), without pairs that share none; within a layer first < second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRow:
    """For how long this rank waited for each rank of its group in one kind of exchange, by the kernels."""

    phase: Phase
    waits: tuple[int, ...]
    """Cycles summed over warps, by expert-parallel rank: to be compared with each other only."""


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
    anchor_error_ns: int = -1
    """How far off start_unix_ns may be where device time was tied to the host's; -1: the host's own."""
    experts: tuple[ExpertRow, ...] = ()
    traffic: tuple[TrafficRecord, ...] = ()
    violations: tuple[ViolationRow, ...] = ()
    coactivation: tuple[CoactivationRow, ...] = ()
    waits: tuple[WaitRow, ...] = ()
    expected_sites: frozenset[int] = frozenset()
    """Call sites that should have fired, as known when the step began."""
    seen_sites: frozenset[int] = frozenset()
    """Call sites that fired, whether or not in every step."""
    unstamped_sites: frozenset[int] = frozenset()
    """Call sites that were called without a time stamp: a device graph was being captured."""
    tracer_ns: int = -1
    """Host time that the tracer took on the model's thread in this step, estimated; -1 = not known."""
