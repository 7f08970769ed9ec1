"""What browsing a store yields: frozen records without logic; durations in nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moetrace_collectors.views.run_records import (
    BarrierRow,
    LayerImbalance,
    LoadMatrix,
    RankPhaseExtension,
    StepRow,
)
from moetrace_schemas.enums import ForwardMode, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One run in the list of runs."""

    run_id: str
    model_name: str
    model_version: str
    ranks: int
    hosts: int
    sample_period: int
    """One in this many steps was sampled."""
    forward_modes: tuple[ForwardMode, ...]
    steps: int
    """Joined steps, warm-up included."""
    warmup_steps: int
    last_step: int
    first_unix_ns: int
    last_unix_ns: int
    clear_steps: int
    ambiguous_steps: int
    step_median_ns: int
    step_p95_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What came to a run."""

    last_step: int
    """Its newest step; -1: none."""
    num_new: int
    """Steps beyond the one that was asked about."""
    num_rows: int
    """Rows of verdicts, repeats included: they grow also when a step comes behind newer ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """The newest steps of a run, and where they were extended."""

    entry: RunEntry
    steps: tuple[StepRow, ...]
    """In step order."""
    by_rank: tuple[RankPhaseExtension, ...]
    by_layer: Mapping[tuple[int, Phase], int]
    """Extension by (layer, phase); layer -1 is the step's tail."""
    layer_of_rank: Mapping[int, int]
    """The layer that holds half or more of what a rank extended; ranks without such a layer are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFilter:
    """Which steps a page asks for; an empty word and -1 ask for all."""

    evidence: str = ""
    cause: str = ""
    phase: str = ""
    forward_mode: str = ""
    rank: int = -1
    slower_ns: int = 0
    """Steps at least this long."""
    text: str = ""
    """Words that must all be found in the step's number, verdict or reason, in any case of letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacets:
    """Words that occur in a run, for the choices of a filter."""

    evidences: tuple[str, ...]
    causes: tuple[str, ...]
    phases: tuple[str, ...]
    forward_modes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPage:
    """One page of the steps that a filter lets through."""

    rows: tuple[StepRow, ...]
    total: int
    last_step: int
    """Newest of them; asked for as `upto`, pages stay where they are while new steps come in."""
    newest_step: int
    """Of the run, whatever the filter says."""
    facets: StepFacets


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """How one rank spent a step."""

    rank: int
    ep_group: int
    work_ns: int
    """Local work on the compute stream."""
    transfer_ns: int
    """Of its exchanges, what the rank that waited least spent in them."""
    wait_ns: int
    """The rest of its exchanges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step over all of its ranks."""

    row: StepRow
    before: int | None
    """The joined step before this one; None where there is none."""
    behind: int | None
    budgets: tuple[RankBudget, ...]
    """By rank; of every rank that sent phase rows."""
    barriers: tuple[BarrierRow, ...]
    """By group and index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSums:
    """Loads summed over a few steps of one forward mode."""

    forward_modes: tuple[ForwardMode, ...]
    """Those that the run has counted steps of."""
    forward_mode: ForwardMode
    cohorts: tuple[str, ...]
    """Those of the run, whatever the forward mode; the empty label is left out."""
    cohort: str
    """The one that is summed; empty for all together."""
    steps: tuple[int, ...]
    """Ascending; fewer than asked for where more would take too long, or hold nothing of the cohort."""
    experts: LoadMatrix | None
    """Routed pairs; None where none were counted."""
    ranks: LoadMatrix | None
    """Received rows."""
    imbalance: tuple[LayerImbalance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficBlocks:
    """Rows and bytes that dispatches sent between blocks of ranks, summed over a few steps."""

    forward_modes: tuple[ForwardMode, ...]
    forward_mode: ForwardMode
    steps: tuple[int, ...]
    ranks: int
    """Ranks of the run: the highest that sent, plus one."""
    block: int
    """Ranks per block."""
    sources: tuple[int, ...]
    """First rank of each block."""
    destinations: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    """rows[i][j] went from block sources[i] to block destinations[j]."""
    bytes: tuple[tuple[int, ...], ...]
