"""What flows between the stages: RankStep -> JoinedStep -> StepVerdict and LayerLoad. Frozen, no logic.

Arrays are numpy, one entry per row, all columns of one record of equal length. Durations are integer
nanoseconds by the sending rank's own clock and are never compared as absolute times across ranks;
`start_unix_ns` exists for drawing only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moetrace_schemas.enums import Cause, ClosedBy, Direction, Evidence, ForwardMode, Phase, PlacementEvent
from moetrace_schemas.placement import PlacementMap, PlacementTerms

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseColumns:
    """Phase rows of one rank's step, in order of start (moetrace_schemas.columns.PHASES)."""

    layer: IntArray
    phase: IntArray
    """Wire codes of moetrace_schemas.enums.Phase."""
    direction: IntArray
    microbatch: IntArray
    ordinal: IntArray
    stream: IntArray
    flags: IntArray
    """Bits of moetrace_schemas.columns.RowFlag; an exchange row has BARRIER."""
    start_offset_ns: IntArray
    duration_ns: IntArray
    bytes: IntArray
    rows: IntArray

    def __len__(self) -> int:
        return len(self.layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCounts:
    """Per-expert counts of one (layer, kind); `counts[e]` belongs to logical expert e."""

    layer: int
    kind: int
    """Wire code of moetrace_schemas.enums.CountKind."""
    counts: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """Rows one rank sent to each expert-parallel rank of its group in one exchange."""

    layer: int
    phase: int
    row_bytes: int
    rows: IntArray
    """rows[d] went to the rank whose ep_rank is d."""
    direction: int = 0
    """Wire code of moetrace_schemas.enums.Direction; layout 1 of the wire carries forward exchanges only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitCycles:
    """What the kernels of one rank's exchanges of a phase waited for each rank of its group."""

    phase: int
    cycles: IntArray
    """cycles[d] for the rank whose ep_rank is d, summed over warps: to be compared with each other only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViolationCount:
    """What contradicts the routing of one layer on one rank, how many times."""

    layer: int
    violation: int
    """Wire code of moetrace_schemas.enums.RoutingViolation."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoactivationColumns:
    """Pairs of experts that share tokens (moetrace_schemas.columns.COACTIVATION)."""

    layer: IntArray
    span: IntArray
    """Wire codes of moetrace_schemas.enums.CoactivationSpan."""
    first: IntArray
    second: IntArray
    count: IntArray

    def __len__(self) -> int:
        return len(self.layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's step (or one microbatch of it), decoded and validated."""

    run_id: str
    step: int
    rank: int
    microbatch: int
    world_size: int
    ep_rank: int
    ep_size: int
    ep_group: int
    forward_mode: ForwardMode
    sample_period: int
    warmup: bool
    clock: str
    duration_ns: int
    start_unix_ns: int
    host_name: str = ""
    model_name: str = ""
    model_version: str = ""
    cohort: str = ""
    placement_version: int = 0
    anchor_error_ns: int = -1
    """How far off `start_unix_ns` may be where device events were tied to unix time; -1: the host's clock."""
    tracer_ns: int = -1
    """Estimated host time that the tracer took on the model's thread in this step; -1 = not said."""
    sent_run_id: str = ""
    """The run id on the wire, where another run had used it before; empty where `run_id` is it."""
    phases: PhaseColumns
    experts: tuple[ExpertCounts, ...] = ()
    unfolded: tuple[ExpertCounts, ...] = ()
    """Counts under a placement whose map is not known yet, as they came; only where the store joins."""
    traffic: tuple[TrafficRow, ...] = ()
    violations: tuple[ViolationCount, ...] = ()
    coactivation: CoactivationColumns | None = None
    waits: tuple[WaitCycles, ...] = ()
    expected_sites: int = 0
    """Wrapped call sites that should have fired in the step; 0 where the writer does not say."""
    seen_sites: int = 0

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Identity: (run, step, rank, microbatch). A second one with the same key is a duplicate."""
        return (self.run_id, self.step, self.rank, self.microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReport:
    """A placement as a rank announced it, a planner proposed it or a person judged it; validated."""

    run_id: str
    version: int
    step: int
    """First step under it; 0 where it is only proposed."""
    rank: int
    event: PlacementEvent
    """ANNOUNCED, PROPOSED or JUDGED."""
    mapping: PlacementMap
    terms: PlacementTerms
    host_name: str = ""
    comparison: str = ""
    """Canonical JSON of the comparison; with JUDGED only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedStep:
    """All that arrived of one step, ranks in ascending (rank, microbatch) order."""

    run_id: str
    step: int
    world_size: int
    rank_steps: tuple[RankStep, ...]
    missing_ranks: tuple[int, ...]
    closed_by: ClosedBy
    last_arrival_monotonic_ns: int = 0
    """This process's monotonic clock at the last arrival; for the latency metric only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierResult:
    """One exchange of one expert-parallel group: who released it and what it cost.

    ::

        rank 0  |== work 4 ==|~~~ wait 3 ~~~|= transfer 1 =|
        rank 1  |=== work 7 (releaser) =====|= transfer 1 =|
                extension = max work - mean work = 7 - 5.5 = 1.5
    """

    ep_group: int
    index: int
    """k, from 0, in the group's order of barriers; the tail after the last barrier has the last index."""
    layer: int
    phase: Phase
    """The exchange: dispatch or combine; outside for the tail of the step, which ends in no exchange."""
    direction: Direction
    microbatch: int
    ordinal: int
    releaser_rank: int
    """Rank that waited least; -1 where it cannot be told."""
    work_phase: Phase
    """Phase with the releaser's largest excess over the mean of the others."""
    transfer_ns: int
    max_work_ns: int
    mean_work_ns: int
    extension_ns: int
    wait_sum_ns: int
    ambiguous: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A (rank, phase) with what it cost; the layer only where one layer holds half of it or more."""

    rank: int
    phase: Phase
    layer: int | None
    worth_ns: int
    """What the step would give back if this rank were average in this phase."""
    share: float
    """worth / summed extension of the step, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """Which rank, in which layer and phase, extended the step, by how much, and why."""

    run_id: str
    step: int
    forward_mode: ForwardMode
    evidence: Evidence
    reason: str
    """One sentence for people: why the evidence is what it is."""
    suspect: Suspect | None
    """None where nothing can be named (evidence insufficient)."""
    cause: Cause
    runner_up: Suspect | None
    step_ns: int
    """Length of the frontier (sum of its increments), ns."""
    extension_ns: int
    """Sum of extensions over the step's barriers, ns."""
    phase_ns: dict[Phase, int] = field(default_factory=dict)
    """The frontier split by phase (critical work, and transfer under dispatch/combine); sums to step_ns."""
    missing_ranks: tuple[int, ...] = ()
    partial: bool = False
    warmup: bool = False
    barriers: tuple[BarrierResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """Expert load of one layer in one joined step and forward mode."""

    layer: int
    forward_mode: ForwardMode
    tokens: int
    """Routed (token, slot) pairs over all ranks, padding left out."""
    max_mean_ratio: float
    """max / mean over experts; 0.0 when there are no pairs."""
    cv: float
    """Population standard deviation / mean over experts."""
    rank_max_mean_ratio: float
    """max / mean of rows received per rank (0.0 where unknown)."""
    hot_expert: int
    dead_experts: int
