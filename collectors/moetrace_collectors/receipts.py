"""Routing receipts over an expert-parallel group: what no rank can see alone (pure).

A group is looked at where all its ranks are there and each dispatcher sent a row per pair that its router
chose, so that rows can be followed from one side to the other:

::

    rank 0  routed [3 1 | 4 0]  sent [4 4] --+--> rank 0  received [5 2 | 0 0]   experts 0, 1 live here
    rank 1  routed [2 1 | 1 2]  sent [3 3] --+--> rank 1  received [0 0 | 5 2]   experts 2, 3

What was received and never chosen is `executed_not_selected`, what was chosen and never came is
`conservation`. Where a dispatcher pads, or sends one copy per rank, nothing is said. An idle rank tells of
its dummy batch only how many pairs it sent, not to which experts: so many rows may have gone anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import IntArray, JoinedStep, RankStep
from moetrace_schemas.enums import (
    COUNT_KIND_CODE,
    PHASE_CODE,
    CountKind,
    ForwardMode,
    Phase,
    RoutingViolation,
)

_ADMITTED = (COUNT_KIND_CODE[CountKind.ROUTED], COUNT_KIND_CODE[CountKind.PADDING])
_DUMMY = COUNT_KIND_CODE[CountKind.DUMMY]
_RECEIVED = COUNT_KIND_CODE[CountKind.RECEIVED]
_DISPATCH = PHASE_CODE[Phase.DISPATCH]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupViolation:
    """One contradiction in one layer of one group."""

    ep_group: int
    microbatch: int
    forward_mode: ForwardMode
    layer: int
    violation: RoutingViolation
    count: int


def group_violations(joined: JoinedStep) -> tuple[GroupViolation, ...]:
    """Contradictions that show only over a whole group, in order of group, microbatch and layer."""
    groups: dict[tuple[int, int], list[RankStep]] = {}
    for rank_step in joined.rank_steps:
        if rank_step.ep_size > 1:
            groups.setdefault((rank_step.ep_group, rank_step.microbatch), []).append(rank_step)
    found = []
    for (ep_group, microbatch), members in sorted(groups.items()):
        for mode, ranks in sorted(_by_mode(members).items()):
            found += _group(ep_group, microbatch, mode, ranks)
    return tuple(found)


def _by_mode(ranks: list[RankStep]) -> dict[ForwardMode, list[RankStep]]:
    """Ranks by what their step is for; an idle rank keeps those company that are not."""
    found: dict[ForwardMode, list[RankStep]] = {}
    for rank in ranks:
        found.setdefault(rank.forward_mode, []).append(rank)
    if len(found) > 1:
        busy = {rank.forward_mode for rank in ranks if not _is_idle(rank)}
        if len(busy) == 1:
            return {busy.pop(): ranks}
    return found


def _is_idle(rank: RankStep) -> bool:
    kinds = {entry.kind for entry in rank.experts}
    return _DUMMY in kinds and kinds.isdisjoint(_ADMITTED)


def _group(ep_group: int, microbatch: int, mode: ForwardMode, ranks: list[RankStep]) -> list[GroupViolation]:
    found: list[GroupViolation] = []
    if {rank.ep_rank for rank in ranks} != set(range(ranks[0].ep_size)) or len(ranks) != ranks[0].ep_size:
        return found
    layers = {entry.layer for rank in ranks for entry in rank.experts}
    counts = [_RankCounts(rank) for rank in ranks] if layers else []
    for layer in sorted(layers):
        for violation, count in _layer(counts, layer):
            if count > 0:
                found.append(
                    GroupViolation(
                        ep_group=ep_group,
                        microbatch=microbatch,
                        forward_mode=mode,
                        layer=layer,
                        violation=violation,
                        count=count,
                    )
                )
    return found


class _RankCounts:
    """One rank's arrays by layer, found once and not again for each layer."""

    def __init__(self, rank: RankStep) -> None:
        self.admitted: dict[int, list[IntArray]] = {}
        self.received: dict[int, list[IntArray]] = {}
        self.dummy: dict[int, int] = {}
        self.sent: dict[int, IntArray] = {}
        for entry in rank.experts:
            if entry.kind in _ADMITTED:
                self.admitted.setdefault(entry.layer, []).append(entry.counts)
            elif entry.kind == _RECEIVED:
                self.received.setdefault(entry.layer, []).append(entry.counts)
            elif entry.kind == _DUMMY:
                self.dummy[entry.layer] = self.dummy.get(entry.layer, 0) + int(entry.counts.sum())
        for row in rank.traffic:
            if row.phase == _DISPATCH:
                self.sent.setdefault(row.layer, row.rows)


def _layer(ranks: list[_RankCounts], layer: int) -> Iterable[tuple[RoutingViolation, int]]:
    admitted, received = [], []
    anywhere = 0
    """Rows of dummy batches, whose experts are not told."""
    for rank in ranks:
        chosen, came = _sum(rank.admitted.get(layer)), _sum(rank.received.get(layer))
        sent, dummy = rank.sent.get(layer), rank.dummy.get(layer, 0)
        if chosen is None and came is not None and layer in rank.dummy:
            chosen = np.zeros_like(came)
        if chosen is None or came is None or sent is None or int(sent.sum()) != int(chosen.sum()) + dummy:
            return ()
        anywhere += dummy
        admitted.append(chosen)
        received.append(came)
    if len({len(counts) for counts in (*admitted, *received)}) != 1:
        return ()
    due, came = np.sum(admitted, axis=0), np.sum(received, axis=0)
    return (
        (RoutingViolation.CONSERVATION, int(due.sum()) + anywhere - int(came.sum())),
        (RoutingViolation.EXECUTED_NOT_SELECTED, int(np.maximum(came - due, 0).sum()) - anywhere),
    )


def _sum(rows: list[IntArray] | None) -> IntArray | None:
    if not rows or len({len(counts) for counts in rows}) != 1:
        return None
    if len(rows) == 1:
        return rows[0]
    total: IntArray = np.sum(rows, axis=0, dtype=np.int64)
    return total
