"""What the views know of one run: frozen records read from the store. No logic beyond simple properties.

Durations are integer nanoseconds. `start_unix_ns` is a rank's own clock and serves drawing only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moetrace_collectors.model import Suspect
from moetrace_schemas.enums import Cause, ClosedBy, Direction, Evidence, ForwardMode, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """A run at a glance."""

    run_id: str
    model_name: str
    model_version: str
    world_size: int
    ranks: tuple[int, ...]
    """Ranks that sent anything."""
    hosts: tuple[str, ...]
    forward_modes: tuple[ForwardMode, ...]
    cohorts: tuple[str, ...]
    """Cohort labels; the empty label (none given) is left out."""
    clocks: tuple[str, ...]
    sample_period: int
    """One in this many steps was sampled."""
    steps: int
    """Joined steps, warm-up included."""
    warmup_steps: int
    first_unix_ns: int
    last_unix_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One joined step and its verdict."""

    step: int
    start_unix_ns: int
    forward_mode: ForwardMode
    evidence: Evidence
    reason: str
    suspect: Suspect | None
    cause: Cause
    runner_up: Suspect | None
    step_ns: int
    extension_ns: int
    phase_ns: Mapping[Phase, int]
    world_size: int
    missing_ranks: tuple[int, ...]
    closed_by: ClosedBy
    warmup: bool

    @property
    def has_length(self) -> bool:
        """Whether `step_ns` says something: a step without a verdict has none, and is not 0 ns long."""
        return self.step_ns > 0

    @property
    def worth_ns(self) -> int:
        """What the named suspect cost; 0 where none is named."""
        return self.suspect.worth_ns if self.suspect is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadView:
    """Whose load a matrix or an imbalance shows."""

    forward_mode: ForwardMode
    cohort: str | None
    """None = all cohorts together; the empty string = steps without a cohort label."""

    @property
    def label(self) -> str:
        """For people."""
        if self.cohort is None:
            return str(self.forward_mode)
        return f"{self.forward_mode}, cohort {self.cohort or '(none)'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMatrix:
    """Counts by layer and column over the steps read: without warm-up, and by rank without partial steps."""

    view: LoadView
    layers: tuple[int, ...]
    columns: tuple[int, ...]
    """Logical experts, or global ranks."""
    counts: tuple[tuple[int | None, ...], ...]
    """counts[i][j] of layers[i] and columns[j]; None where nothing was reported, which is not zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerImbalance:
    """How unevenly one layer's experts and ranks were loaded over the steps read."""

    view: LoadView
    layer: int
    pairs: int
    """Routed (token, slot) pairs over all ranks, padding left out."""
    experts: int
    max_mean_ratio: float
    """max / mean over experts of the pairs summed over steps; 0.0 without pairs."""
    step_p95_max_mean_ratio: float | None
    """95th percentile over steps of the same ratio within one step; None for a single cohort."""
    cv: float
    """Population standard deviation / mean over experts."""
    rank_max_mean_ratio: float | None
    """max / mean over ranks of the rows received; None where no rank reported rows."""
    hot_expert: int
    dead_experts: int
    """Experts that no pair reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Rows and bytes sent from rank to rank by the dispatches of the steps read."""

    ranks: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    """rows[i][j] went from ranks[i] to ranks[j]."""
    bytes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPhaseExtension:
    """What one rank's work in one phase added to the critical path, summed over barriers and steps read."""

    rank: int
    phase: Phase
    extension_ns: int
    """Of barriers where waits and work agree."""
    ambiguous_ns: int
    """Of barriers where they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseInterval:
    """One phase row of one rank in the step that is drawn."""

    rank: int
    ep_group: int
    layer: int
    phase: Phase
    direction: Direction
    microbatch: int
    ordinal: int
    is_barrier: bool
    stream: int
    error: bool
    start_unix_ns: int
    duration_ns: int
    bytes: int
    """Payload sent; -1 = unknown."""
    rows: int
    """Rows sent or worked on; -1 = unknown."""

    @property
    def exchange(self) -> ExchangeKey:
        """Which exchange this row belongs to, where it is one."""
        return (self.ep_group, self.layer, self.phase, self.direction, self.microbatch, self.ordinal)


ExchangeKey = tuple[int, int, Phase, Direction, int, int]
"""(ep_group, layer, phase, direction, microbatch, ordinal)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierRow:
    """One exchange of the step that is drawn (model.BarrierResult as stored)."""

    ep_group: int
    index: int
    layer: int
    phase: Phase
    direction: Direction
    microbatch: int
    ordinal: int
    releaser_rank: int
    work_phase: Phase
    transfer_ns: int
    extension_ns: int
    ambiguous: bool

    @property
    def exchange(self) -> ExchangeKey:
        """Its key among phase rows."""
        return (self.ep_group, self.layer, self.phase, self.direction, self.microbatch, self.ordinal)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDetail:
    """One step, enough to draw it."""

    step: int
    ranks: tuple[int, ...]
    """Every rank that sent this step."""
    shown_ranks: tuple[int, ...]
    """Ranks whose rows were read; all of them unless there are too many to draw."""
    intervals: tuple[PhaseInterval, ...]
    """By rank and start."""
    barriers: tuple[BarrierRow, ...]
    """By group and index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """What became of everything that arrived; nothing is lost silently."""

    rank_steps: int
    """Rank steps stored, late ones included."""
    late: int
    """Of those, arrived after their step had closed."""
    events: Mapping[tuple[str, str], int]
    """collector_events of this run by (kind, reason)."""
    unattributed_rejects: int
    """Rejected before a run id could be read; they may belong to other runs of the store."""
    steps_by_closed_by: Mapping[ClosedBy, int]
    missing_by_rank: Mapping[int, int]
    """Joined steps that a rank was missing from."""
    pairs_by_kind: Mapping[str, int]
    """Sums of expert counts by CountKind over the steps read."""

    def events_of(self, kind: str) -> int:
        """Events of one kind over all reasons."""
        return sum(count for (name, _), count in self.events.items() if name == kind)

    @property
    def anything_lost(self) -> bool:
        """Whether a reader should be told before trusting the figures."""
        lost = self.late + self.unattributed_rejects + sum(self.missing_by_rank.values())
        return bool(
            lost or any(self.events_of(kind) for kind in ("late", "duplicate", "rejected", "partial"))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Everything that the document, the terminal and the report show of one run."""

    overview: RunOverview
    steps: tuple[StepRow, ...]
    """In step order; the newest ones where the run has more than are read."""
    imbalance: tuple[LayerImbalance, ...]
    expert_loads: tuple[LoadMatrix, ...]
    """Routed pairs by layer and expert: per forward mode, all cohorts first, then each cohort."""
    rank_loads: tuple[LoadMatrix, ...]
    """Received rows by layer and rank, per forward mode."""
    traffic: Traffic | None
    extensions: tuple[RankPhaseExtension, ...]
    detail: StepDetail | None
    """The step that is drawn: the worst one, or the one asked for."""
    accounting: Accounting
