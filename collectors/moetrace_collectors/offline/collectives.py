"""Collectives of several ranks, joined by key and ordinal, with wait, transfer and releaser. Pure.

A collective's key is its process group; its place among the collectives of that key is the ordinal. A
place alone proves nothing (a trace may begin later or lack an event), so the join is checked:

1. what is known of each collective (kind, data type, size where all ranks must send the same) must be
   equal at every place, for the whole sequence; sequence numbers are used where a trace has them;
2. where sequences differ in length, the one shift that makes the overlap equal is taken, if there is
   exactly one; if several fit, or none, that key is not joined and a warning says so;
3. once joined, the ends must agree in time up to one offset and drift per rank (`align`); a rank whose
   ends contradict the pairing is taken out of the join.

::

    rank 0   a2a a2a a2a ar  a2a ar          rank 0 wait = duration 0 - min
    rank 1       a2a a2a ar  a2a ar ar       transfer = min over ranks; releaser = who waited least
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moetrace_collectors.align import SAME_CLOCK, ClockFit, ClockRefused, fit_clock
from moetrace_collectors.model import IntArray
from moetrace_collectors.offline.phases import DevicePhases
from moetrace_collectors.offline.rank_trace import CollectiveDetail, RankTrace

SYMMETRIC_KINDS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier"})
"""Kinds whose size is the same on every rank; an all-to-all sends what it has."""
RESOLUTION_NS = 100
"""Durations that differ by less are equal: device timestamps are no finer."""
LEAST_OVERLAP = 3
"""Collectives that must match before a shifted sequence is believed."""

Signature = tuple[str, str, int]
"""Kind, data type ("" = not told), elements (-1 = not told or free to differ)."""
GroupKey = tuple[str, tuple[int, ...]]
"""Name of the process group and its ranks, as far as told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCollective:
    """One collective on one rank."""

    row: int
    """Index of its device row."""
    kind: str
    group: GroupKey
    group_size: int
    sequence: int
    signature: Signature
    start_ns: int
    """Unix time by the rank's clock, as all times here."""
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Time inside it: wait and transfer."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedCollective:
    """One collective on all the ranks at hand."""

    index: int
    """Place among all joined collectives, in order of the first rank's start."""
    kind: str
    group: GroupKey
    ordinal: int
    """Place among the collectives of its group."""
    by_rank: Mapping[int, RankCollective]
    missing_ranks: tuple[int, ...] = ()
    """Members of the group that are not among the traces; waits are lower bounds then."""

    @property
    def durations_ns(self) -> dict[int, int]:
        """By rank."""
        return {rank: one.duration_ns for rank, one in self.by_rank.items()}

    @property
    def transfer_ns(self) -> int:
        """Shortest duration over ranks: nobody waits less than not at all."""
        return min(one.duration_ns for one in self.by_rank.values())

    @property
    def releaser(self) -> int:
        """Rank that waited least; the lowest of several that no clock tells apart."""
        least = self.transfer_ns + RESOLUTION_NS
        return min(rank for rank, one in self.by_rank.items() if one.duration_ns < least)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveJoin:
    """What joining found."""

    joined: tuple[JoinedCollective, ...]
    clocks: Mapping[int, ClockFit]
    """Per rank; the lowest rank is the reference. Ranks whose clock is not known are absent."""
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class _Matched:
    """One group's sequences with the place in each that corresponds to place 0 of the group."""

    group: GroupKey
    by_rank: dict[int, list[RankCollective]]
    first: dict[int, int] = field(default_factory=dict)
    length: int = 0

    def ends(self, rank: int) -> IntArray:
        rows = self.by_rank[rank][self.first[rank] : self.first[rank] + self.length]
        return np.array([one.end_ns for one in rows], dtype=np.int64)


def rank_collectives(trace: RankTrace, phases: DevicePhases) -> list[RankCollective]:
    """Every collective of a rank in order of start."""
    device = trace.device
    found = []
    for row in np.flatnonzero(phases.communicates).tolist():
        index = int(device.detail[row])
        detail = trace.collectives[index] if index >= 0 else CollectiveDetail()
        kind = phases.kind[row]
        start = int(device.start_ns[row]) + trace.base_unix_ns
        found.append(
            RankCollective(
                row=row,
                kind=kind,
                group=(detail.group, detail.group_ranks),
                group_size=detail.group_size,
                sequence=detail.sequence,
                signature=(kind, detail.dtype, detail.elements if kind in SYMMETRIC_KINDS else -1),
                start_ns=start,
                end_ns=start + int(device.duration_ns[row]),
            )
        )
    return found


def join_collectives(by_rank: Mapping[int, Sequence[RankCollective]]) -> CollectiveJoin:
    """Join the collectives of at least two ranks, and compare their clocks on the way."""
    warnings: list[str] = []
    matched = []
    groups: dict[GroupKey, dict[int, list[RankCollective]]] = {}
    for rank, collectives in sorted(by_rank.items()):
        for one in collectives:
            groups.setdefault(one.group, {}).setdefault(rank, []).append(one)
    for group, sequences in groups.items():
        if len(sequences) < 2:
            continue
        match = _match(group, sequences)
        if isinstance(match, str):
            warnings.append(f"collectives of {_group_name(group)} are not joined: {match}")
        else:
            matched.append(match)
    clocks, refused = _clocks(sorted(by_rank), matched)
    for rank, refusal in refused.items():
        warnings.append(f"the clock of rank {rank} is not aligned: {refusal.reason}")
        if refusal.disagree:
            warnings.append(f"collectives of rank {rank} are left out of the join: their ends contradict it")
            for match in matched:
                match.first.pop(rank, None)
    joined = sorted(
        (one for match in matched for one in _joined(match)),
        key=lambda one: min(c.start_ns for r, c in one.by_rank.items() if r == min(one.by_rank)),
    )
    return CollectiveJoin(
        joined=tuple(_numbered(index, one) for index, one in enumerate(joined)),
        clocks=clocks,
        warnings=tuple(warnings),
    )


def _numbered(index: int, one: JoinedCollective) -> JoinedCollective:
    return JoinedCollective(
        index=index,
        kind=one.kind,
        group=one.group,
        ordinal=one.ordinal,
        by_rank=one.by_rank,
        missing_ranks=one.missing_ranks,
    )


def _match(group: GroupKey, sequences: dict[int, list[RankCollective]]) -> _Matched | str:
    """Places that correspond, or why there are none."""
    match = _Matched(group=group, by_rank=sequences)
    ranks = sorted(sequences)
    reference = ranks[0]
    match.first[reference] = 0
    start, stop = 0, len(sequences[reference])
    for rank in ranks[1:]:
        shift = _shift(sequences[reference], sequences[rank])
        if shift is None:
            return (
                f"what ranks {reference} and {rank} recorded does not match "
                f"({len(sequences[reference])} and {len(sequences[rank])} collectives)"
            )
        match.first[rank] = shift
        # The group's places are those of the reference; each rank covers part of them.
        start = max(start, -shift)
        stop = min(stop, len(sequences[rank]) - shift)
    if stop <= start:
        return "the ranks' traces share none of them"
    match.first = {rank: shift + start for rank, shift in match.first.items()}
    match.length = stop - start
    return match


def _shift(reference: list[RankCollective], other: list[RankCollective]) -> int | None:
    """Place in `other` of the reference's place 0; None where it cannot be told."""
    if all(one.sequence >= 0 for one in (*reference, *other)):
        places = {one.sequence: place for place, one in enumerate(other)}
        shifts = {
            places[one.sequence] - place for place, one in enumerate(reference) if one.sequence in places
        }
        return shifts.pop() if len(shifts) == 1 else None
    wanted = [one.signature for one in reference]
    offered = [one.signature for one in other]
    if len(wanted) == len(offered) and _alike(wanted, offered):
        return 0
    fitting = []
    least = max(LEAST_OVERLAP, min(len(wanted), len(offered)) // 2)
    for shift in range(least - len(wanted), len(offered) - least + 1):
        here = wanted[max(0, -shift) : len(offered) - shift]
        there = offered[max(0, shift) : len(wanted) + shift]
        if len(here) >= least and _alike(here, there):
            fitting.append(shift)
    return fitting[0] if len(fitting) == 1 else None


def _alike(first: list[Signature], second: list[Signature]) -> bool:
    return all(
        a[0] == b[0] and (not a[1] or not b[1] or a[1] == b[1]) and (a[2] < 0 or b[2] < 0 or a[2] == b[2])
        for a, b in zip(first, second, strict=True)
    )


def _clocks(ranks: list[int], matched: list[_Matched]) -> tuple[dict[int, ClockFit], dict[int, ClockRefused]]:
    """Every rank against the lowest one that most of the others do not contradict."""
    for reference in ranks:
        clocks, refused = _clocks_against(reference, ranks, matched)
        if sum(refusal.disagree for refusal in refused.values()) * 2 <= len(ranks) - 1:
            return clocks, refused
    return _clocks_against(ranks[0], ranks, matched)


def _clocks_against(
    reference: int, ranks: list[int], matched: list[_Matched]
) -> tuple[dict[int, ClockFit], dict[int, ClockRefused]]:
    """Every rank against the reference, directly or through a rank that both share exchanges with."""
    clocks: dict[int, ClockFit] = {reference: SAME_CLOCK}
    refused: dict[int, ClockRefused] = {}
    waiting = [rank for rank in ranks if rank != reference]
    while waiting:
        later = []
        for rank in waiting:
            ends, reference_ends = _shared_ends(rank, clocks, matched)
            if not len(ends):
                later.append(rank)
                continue
            fit = fit_clock(reference_ends, ends)
            if isinstance(fit, ClockRefused):
                refused[rank] = fit
            else:
                clocks[rank] = fit
        if len(later) == len(waiting):
            for rank in later:
                refused[rank] = ClockRefused(
                    reason="it shares no joined collective with the others", disagree=False
                )
            break
        waiting = later
    return clocks, refused


def _shared_ends(
    rank: int, clocks: Mapping[int, ClockFit], matched: list[_Matched]
) -> tuple[IntArray, IntArray]:
    """Ends of the rank, and the same ends by the reference clock as the lowest aligned rank saw them."""
    ends, reference_ends = [], []
    for match in matched:
        known = [other for other in sorted(match.first) if other in clocks]
        if rank in match.first and known:
            ends.append(match.ends(rank))
            reference_ends.append(clocks[known[0]].to_reference(match.ends(known[0])))
    if not ends:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    return np.concatenate(ends), np.concatenate(reference_ends)


def _joined(match: _Matched) -> list[JoinedCollective]:
    if len(match.first) < 2:
        return []
    found = []
    for ordinal in range(match.length):
        by_rank = {rank: match.by_rank[rank][first + ordinal] for rank, first in sorted(match.first.items())}
        any_one = next(iter(by_rank.values()))
        members = match.group[1]
        found.append(
            JoinedCollective(
                index=0,
                kind=any_one.kind,
                group=match.group,
                ordinal=ordinal,
                by_rank=by_rank,
                missing_ranks=tuple(rank for rank in members if rank not in by_rank),
            )
        )
    return found


def _group_name(group: GroupKey) -> str:
    return f"process group {group[0]}" if group[0] else "the one process group that can be told"
