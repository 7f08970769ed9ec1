"""Geometry of one step across ranks: lanes, waits apart from transfers, the critical path. Pure, no pixels.

Ranks stamp their rows by their own clocks, which cannot be compared. An exchange ends together on all
ranks of its group, so each lane is shifted by the median, over the exchanges it shares with the group's
reference rank, of the difference of their ends:

    rank 0  |= work =|~~~~~ wait ~~~~~|= transfer =|
    rank 1      |======= work ========|= transfer =|       critical: rank 1's work, then the transfer
                                                   ^ both lanes are laid so that these ends meet

That is for drawing. No verdict uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from moetrace_collectors.views.run_records import BarrierRow, ExchangeKey, PhaseInterval, StepDetail
from moetrace_schemas.enums import Direction, Phase


class MarkKind(StrEnum):
    """What a stretch of a lane shows."""

    WORK = "work"
    WAIT = "wait"
    """The part of an exchange in which this rank waited for the others."""
    TRANSFER = "transfer"
    """The rest of the exchange: what the rank that waited least spent in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One stretch of a lane, ns from the start of the picture."""

    kind: MarkKind
    phase: Phase
    layer: int
    direction: Direction
    microbatch: int
    start_ns: int
    duration_ns: int
    side_stream: bool
    """Not on the compute stream; drawn beside the lane's main row."""
    error: bool
    rows: int
    """-1 = unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One rank, its marks in order of start."""

    rank: int
    marks: tuple[Mark, ...]
    """Empty where no rows of this rank are in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalStretch:
    """The rank that the step waited for, between two barriers."""

    rank: int
    barrier: int
    """Index of the barrier that ends it; where a number is skipped, the path has a gap."""
    start_ns: int
    end_ns: int
    layer: int
    phase: Phase
    """Phase of its largest excess over the mean."""
    extension_ns: int
    certain: bool
    """False where waits and work disagree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step as it can be drawn."""

    step: int
    lanes: tuple[Lane, ...]
    hidden_ranks: int
    """Ranks of the step that have no lane."""
    critical: tuple[CriticalStretch, ...]
    """In order of time; of one expert-parallel group."""
    end_ns: int
    """Length of the picture."""


def lay_out(detail: StepDetail, *, critical_rank: int | None = None) -> Timeline:
    """Lanes of the shown ranks and the critical path of the critical rank's group (or of the first group)."""
    shifts = _shifts(detail.intervals)
    transfers = _transfers(detail)
    marks: dict[int, list[Mark]] = {rank: [] for rank in detail.shown_ranks}
    for interval in detail.intervals:
        marks[interval.rank] += _marks(interval, shifts[interval.rank], transfers)
    stretches = _critical(detail, shifts, critical_rank)
    every = [mark for lane in marks.values() for mark in lane]
    origin = min((mark.start_ns for mark in every), default=0)
    return Timeline(
        step=detail.step,
        lanes=tuple(
            Lane(
                rank=rank,
                marks=tuple(
                    replace(mark, start_ns=mark.start_ns - origin) for mark in sorted(lane, key=_by_start)
                ),
            )
            for rank, lane in marks.items()
        ),
        hidden_ranks=len(detail.ranks) - len(detail.shown_ranks),
        critical=tuple(
            replace(item, start_ns=item.start_ns - origin, end_ns=item.end_ns - origin) for item in stretches
        ),
        end_ns=max((mark.start_ns + mark.duration_ns for mark in every), default=0) - origin,
    )


def costliest_window(timeline: Timeline, *, stretches: int = 5, at_least: int = 16) -> tuple[int, int] | None:
    """The part of a long step worth a closer look: around the critical stretch with the largest extension.

    None for a step of fewer than `at_least` stretches: the whole of it can be read as it is.
    """
    if len(timeline.critical) < at_least:
        return None
    costliest = max(range(len(timeline.critical)), key=lambda index: timeline.critical[index].extension_ns)
    first = min(max(0, costliest - stretches // 2), len(timeline.critical) - stretches)
    window = timeline.critical[first : first + stretches]
    return min(item.start_ns for item in window), max(item.end_ns for item in window)


def _by_start(mark: Mark) -> tuple[int, int]:
    return (mark.start_ns, mark.duration_ns)


def _marks(interval: PhaseInterval, shift: int, transfers: Mapping[ExchangeKey, int]) -> list[Mark]:
    start = interval.start_unix_ns + shift
    if not interval.is_barrier:
        return [_mark(interval, MarkKind.WORK, start, interval.duration_ns)]
    transfer = min(transfers.get(interval.exchange, interval.duration_ns), interval.duration_ns)
    wait = interval.duration_ns - transfer
    parts = [_mark(interval, MarkKind.WAIT, start, wait)] if wait > 0 else []
    return [*parts, _mark(interval, MarkKind.TRANSFER, start + wait, transfer)]


def _mark(interval: PhaseInterval, kind: MarkKind, start_ns: int, duration_ns: int) -> Mark:
    return Mark(
        kind=kind,
        phase=interval.phase,
        layer=interval.layer,
        direction=interval.direction,
        microbatch=interval.microbatch,
        start_ns=start_ns,
        duration_ns=duration_ns,
        side_stream=interval.stream != 0,
        error=interval.error,
        rows=interval.rows,
    )


def _transfers(detail: StepDetail) -> dict[ExchangeKey, int]:
    """Shortest duration per exchange: as the verdict stored it, else over the ranks at hand."""
    transfers: dict[ExchangeKey, int] = {}
    for interval in detail.intervals:
        if interval.is_barrier:
            known = transfers.get(interval.exchange, interval.duration_ns)
            transfers[interval.exchange] = min(known, interval.duration_ns)
    for barrier in detail.barriers:
        if barrier.exchange in transfers:
            transfers[barrier.exchange] = barrier.transfer_ns
    return transfers


def _exchange_ends(intervals: Sequence[PhaseInterval]) -> dict[int, dict[ExchangeKey, int]]:
    ends: dict[int, dict[ExchangeKey, int]] = defaultdict(dict)
    for interval in intervals:
        if interval.is_barrier:
            ends[interval.rank][interval.exchange] = interval.start_unix_ns + interval.duration_ns
    return ends


def _shifts(intervals: Sequence[PhaseInterval]) -> dict[int, int]:
    """What to add to each rank's clock; 0 for a rank that shares no exchange with its group."""
    ends = _exchange_ends(intervals)
    group_of = {interval.rank: interval.ep_group for interval in intervals}
    reference: dict[int, int] = {}
    for rank in sorted(group_of):
        best = reference.get(group_of[rank])
        if best is None or len(ends[rank]) > len(ends[best]):
            reference[group_of[rank]] = rank
    shifts = {}
    for rank, group in group_of.items():
        against = ends[reference[group]]
        differences = [against[key] - end for key, end in ends[rank].items() if key in against]
        shifts[rank] = round(median(differences)) if differences else 0
    return shifts


def _critical(
    detail: StepDetail, shifts: Mapping[int, int], critical_rank: int | None
) -> list[CriticalStretch]:
    ends = _exchange_ends(detail.intervals)
    bounds: dict[int, tuple[int, int]] = {}
    group_of: dict[int, int] = {}
    for interval in detail.intervals:
        interval_end = interval.start_unix_ns + interval.duration_ns
        first, last = bounds.get(interval.rank, (interval.start_unix_ns, interval_end))
        bounds[interval.rank] = (min(first, interval.start_unix_ns), max(last, interval_end))
        group_of[interval.rank] = interval.ep_group
    groups = sorted({barrier.ep_group for barrier in detail.barriers})
    if not groups:
        return []
    group = group_of.get(critical_rank, groups[0]) if critical_rank is not None else groups[0]
    stretches = []
    previous: BarrierRow | None = None
    for barrier in detail.barriers:
        if barrier.ep_group != group:
            continue
        rank = barrier.releaser_rank
        if rank in bounds:  # a releaser that cannot be told, or without a lane, leaves a gap in the path
            opening, closing = bounds[rank]
            start = ends[rank].get(previous.exchange) if previous is not None else opening
            end = closing if _is_tail(barrier) else ends[rank].get(barrier.exchange)
            if start is not None and end is not None and end > start:
                stretches.append(
                    CriticalStretch(
                        rank=rank,
                        barrier=barrier.index,
                        start_ns=start + shifts[rank],
                        end_ns=end + shifts[rank],
                        layer=barrier.layer,
                        phase=barrier.work_phase,
                        extension_ns=barrier.extension_ns,
                        certain=not barrier.ambiguous,
                    )
                )
        previous = barrier
    return stretches


def _is_tail(barrier: BarrierRow) -> bool:
    return barrier.phase not in (Phase.DISPATCH, Phase.COMBINE)
