"""Phase rows of the ranks of one expert-parallel group -> ordered exchanges and the local work before each.

First stage of the verdict. It only sorts and sums durations: it judges nothing and never reads a clock.

::

    rows of a rank   |outside|router|permute|<dispatch>|expert_gemm|<combine>|unpermute|
    exchanges                                    k=0                  k=1      tail
    work before it   [        w[r, 0, phase]   ]        [ w[r, 1] ]            [ w[r, 2] ]

The tail is the work after the last exchange. Nothing synchronises it, so it is a pseudo-exchange without
transfer, and what the later stages read from it is weaker evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moetrace_collectors.model import IntArray, JoinedStep, PhaseColumns, RankStep
from moetrace_collectors.verdict.overlap import exposed_durations
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import PHASE_BY_CODE, PHASE_CODE, Phase

BoolArray = npt.NDArray[np.bool_]

NUM_PHASES = max(PHASE_BY_CODE) + 1
"""Length of every phase axis; the index is the phase's wire code."""

EXCHANGE_CODES = (PHASE_CODE[Phase.DISPATCH], PHASE_CODE[Phase.COMBINE])
GEMM_CODE = PHASE_CODE[Phase.EXPERT_GEMM]
OUTSIDE_CODE = PHASE_CODE[Phase.OUTSIDE]

TAIL_LAYER = -1
UNKNOWN = -1
"""Rows or bytes that a rank did not tell."""

KEY_COLUMNS = ("layer", "phase", "direction", "microbatch", "ordinal")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSequence:
    """One EP group's step as arrays over ranks R, exchanges K (the tail is the last one) and phases P."""

    ep_group: int
    ep_size: int
    ranks: IntArray
    """[R], ascending: the ranks that arrived with a comparable sequence."""
    left_out_ranks: tuple[int, ...]
    """Arrived, but with so few of the group's exchanges (a truncated step) that they count as missing."""
    keys: IntArray
    """[K, 5]: layer, phase, direction, microbatch, ordinal of each exchange; the tail is (-1, outside, 0, 0, 0)."""
    work_ns: IntArray
    """[R, K, P]: exposed local work since the exchange before, by phase."""
    exchange_ns: IntArray
    """[R, K]: exposed time inside the exchange, transfer plus wait; 0 for the tail."""
    sent_bytes: IntArray
    """[R, K]: payload of the exchange; -1 = unknown."""
    gemm_rows: IntArray
    """[R, K]: rows that this rank's experts worked on before the exchange; -1 = unknown."""
    work_layer: IntArray
    """[K, P]: the layer that a cell's rows belong to (an unpermute of layer 3 counts before layer 4's dispatch)."""
    unmatched: BoolArray
    """[K]: ranks disagree on the exchanges at or just before this one; its figures are doubtful."""

    @property
    def num_exchanges(self) -> int:
        """Real exchanges, without the tail."""
        return len(self.keys) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Ranks whose rows have the same layers, phases, keys and flags in the same order."""

    members: list[int]
    """Indices into the group's ranks."""
    keys: IntArray
    """[B, 5]"""
    work_ns: IntArray
    """[M, B + 1, P]"""
    exchange_ns: IntArray
    """[M, B]"""
    sent_bytes: IntArray
    gemm_rows: IntArray
    """[M, B + 1]"""
    work_layer: IntArray
    """[B + 1, P]"""


def group_sequences(joined: JoinedStep) -> tuple[GroupSequence, ...]:
    """Sequences of every EP group of a joined step, in ascending order of group."""
    groups: dict[int, dict[int, list[RankStep]]] = {}
    for rank_step in joined.rank_steps:
        groups.setdefault(rank_step.ep_group, {}).setdefault(rank_step.rank, []).append(rank_step)
    return tuple(_group_sequence(group, groups[group]) for group in sorted(groups))


def _group_sequence(ep_group: int, by_rank: dict[int, list[RankStep]]) -> GroupSequence:
    ranks = sorted(by_rank)
    ep_size = max(rank_step.ep_size for rank_steps in by_rank.values() for rank_step in rank_steps)
    columns = [_merge(by_rank[rank]) for rank in ranks]
    classes = [_rows(members, columns, ep_size) for members in _same_structure(columns)]
    if len(classes) == 1:
        return _from_one_class(ep_group, ep_size, ranks, classes[0])
    return _from_many_classes(ep_group, ep_size, ranks, classes)


def _merge(rank_steps: list[RankStep]) -> PhaseColumns:
    """One rank's rows in order of start; several records of one rank are its microbatches."""
    if len(rank_steps) == 1:
        return rank_steps[0].phases
    # One rank's records share one clock, so ordering them by start is no comparison across ranks.
    starts = np.concatenate([r.start_unix_ns + r.phases.start_offset_ns for r in rank_steps])
    order = np.argsort(starts, kind="stable")
    first_start = min(r.start_unix_ns for r in rank_steps)
    microbatch = np.concatenate(
        [
            r.phases.microbatch if r.phases.microbatch.any() else np.full(len(r.phases), r.microbatch)
            for r in rank_steps
        ]
    )
    merged = {
        name: np.concatenate([getattr(r.phases, name) for r in rank_steps])[order]
        for name in PhaseColumns.__slots__
    }
    merged["microbatch"] = microbatch[order]
    merged["start_offset_ns"] = starts[order] - first_start
    return PhaseColumns(**merged)


def _same_structure(columns: Sequence[PhaseColumns]) -> list[list[int]]:
    """Indices of ranks with identical structure, largest class first (by first member among equals)."""
    classes: dict[bytes, list[int]] = {}
    for index, rows in enumerate(columns):
        structure = np.stack(
            [getattr(rows, name) for name in KEY_COLUMNS] + [rows.flags & int(RowFlag.BARRIER)],
            dtype=np.int64,
        )
        classes.setdefault(structure.tobytes(), []).append(index)
    return sorted(classes.values(), key=lambda members: (-len(members), members[0]))


def _rows(members: list[int], columns: Sequence[PhaseColumns], ep_size: int) -> _Rows:
    first = columns[members[0]]
    is_exchange = _exchange_rows(first, ep_size)
    num_exchanges = int(is_exchange.sum())
    segment: IntArray = np.cumsum(is_exchange) - is_exchange
    keys = np.stack([getattr(first, name)[is_exchange] for name in KEY_COLUMNS], axis=1).astype(np.int64)

    durations = np.stack([exposed_durations(columns[index]) for index in members])
    local = ~is_exchange
    cell = segment[local] * NUM_PHASES + first.phase[local]
    work = _sum_by_cell(durations[:, local], cell, (num_exchanges + 1) * NUM_PHASES)

    work_layer = np.full((num_exchanges + 1) * NUM_PHASES, TAIL_LAYER, dtype=np.int64)
    work_layer[:-NUM_PHASES] = np.repeat(keys[:, 0], NUM_PHASES)
    work_layer[cell] = first.layer[local]

    is_gemm = first.phase == GEMM_CODE
    rows = np.stack([columns[index].rows[is_gemm] for index in members])
    gemm_segment: IntArray = segment[is_gemm]
    gemm_rows = _sum_by_cell(np.maximum(rows, 0), gemm_segment, num_exchanges + 1)
    told = _sum_by_cell((rows >= 0).astype(np.int64), gemm_segment, num_exchanges + 1)
    gemm_rows[told == 0] = UNKNOWN
    return _Rows(
        members=members,
        keys=keys,
        work_ns=work.reshape(len(members), num_exchanges + 1, NUM_PHASES),
        exchange_ns=durations[:, is_exchange],
        sent_bytes=np.stack([columns[index].bytes[is_exchange] for index in members]),
        gemm_rows=gemm_rows,
        work_layer=work_layer.reshape(num_exchanges + 1, NUM_PHASES),
    )


def _exchange_rows(rows: PhaseColumns, ep_size: int) -> BoolArray:
    """Which rows are exchanges: those flagged BARRIER.

    Foreign senders may not know the flag: where no row of a (layer, phase) has it, every dispatch and
    combine row of that (layer, phase) is an exchange. One rank alone exchanges nothing.
    """
    if ep_size <= 1:
        return np.zeros(len(rows), dtype=np.bool_)
    flagged: BoolArray = (rows.flags & int(RowFlag.BARRIER)) != 0
    place = rows.layer * NUM_PHASES + rows.phase
    exchange_phase = np.isin(rows.phase, EXCHANGE_CODES)
    unflagged_place = exchange_phase & ~np.isin(place, place[flagged])
    return flagged | unflagged_place


def _sum_by_cell(values: IntArray, cell: IntArray, num_cells: int) -> IntArray:
    """Sums over the last axis by cell: [M, n] -> [M, num_cells]."""
    sums = np.zeros((len(values), num_cells), dtype=np.int64)
    if len(cell):
        order = np.argsort(cell, kind="stable")
        ordered = cell[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        sums[:, ordered[starts]] = np.add.reduceat(values[:, order], starts, axis=1)
    return sums


def _from_one_class(ep_group: int, ep_size: int, ranks: list[int], rows: _Rows) -> GroupSequence:
    members = len(rows.members)
    return GroupSequence(
        ep_group=ep_group,
        ep_size=ep_size,
        ranks=np.array(ranks, dtype=np.int64),
        left_out_ranks=(),
        keys=_with_tail(rows.keys),
        work_ns=rows.work_ns,
        exchange_ns=np.concatenate([rows.exchange_ns, np.zeros((members, 1), dtype=np.int64)], axis=1),
        sent_bytes=np.concatenate([rows.sent_bytes, np.full((members, 1), UNKNOWN, dtype=np.int64)], axis=1),
        gemm_rows=rows.gemm_rows,
        work_layer=rows.work_layer,
        unmatched=np.zeros(len(rows.keys) + 1, dtype=np.bool_),
    )


def _with_tail(keys: IntArray) -> IntArray:
    tail = np.array([[TAIL_LAYER, OUTSIDE_CODE, 0, 0, 0]], dtype=np.int64)
    return np.concatenate([keys.reshape(-1, len(KEY_COLUMNS)), tail])


def _from_many_classes(ep_group: int, ep_size: int, ranks: list[int], classes: list[_Rows]) -> GroupSequence:
    """Match exchanges by key where ranks did not record the same rows.

    An exchange that only some ranks have is no meeting point of the group. Its shortest duration was
    spent all the same, so it becomes local work of the ranks that have it, and the next common
    exchange is marked, since what led to it differs by more than work::

        rank 0   ==|k0|==|x|==|k1|        common: k0, k1
        rank 1   ==|k0|=======|k1|        k1 is unmatched; x counts as local work of rank 0
    """
    comparable = _comparable(classes)
    left_out = tuple(
        sorted(
            ranks[m] for rows in classes if all(rows is not kept for kept in comparable) for m in rows.members
        )
    )
    common = set.intersection(*({tuple(key) for key in rows.keys.tolist()} for rows in comparable))
    order = {
        key: k
        for k, key in enumerate(key for key in map(tuple, comparable[0].keys.tolist()) if key in common)
    }
    keys = np.array(list(order), dtype=np.int64).reshape(-1, len(KEY_COLUMNS))
    members = sorted(m for rows in comparable for m in rows.members)
    position = {member: r for r, member in enumerate(members)}

    num_cells = len(keys) + 1
    work = np.zeros((len(members), num_cells, NUM_PHASES), dtype=np.int64)
    exchange = np.zeros((len(members), num_cells), dtype=np.int64)
    sent = np.full((len(members), num_cells), UNKNOWN, dtype=np.int64)
    gemm_rows = np.full((len(members), num_cells), UNKNOWN, dtype=np.int64)
    work_layer = np.full((num_cells, NUM_PHASES), TAIL_LAYER, dtype=np.int64)
    unmatched = np.zeros(num_cells, dtype=np.bool_)
    extra_transfer = _extra_transfers(comparable, common)
    for rows in reversed(comparable):  # the largest class last, so that its layers stand
        where = [position[member] for member in rows.members]
        targets = [order.get(tuple(key)) for key in rows.keys.tolist()]
        after = _next_common(targets, num_cells - 1)
        for j, k in enumerate(after):
            work[where, k] += rows.work_ns[:, j]
            known = rows.gemm_rows[:, j] >= 0
            gemm_rows[where, k] = np.where(
                known, np.maximum(gemm_rows[where, k], 0) + rows.gemm_rows[:, j], gemm_rows[where, k]
            )
            used = rows.work_ns[:, j].any(axis=0)
            work_layer[k, used] = rows.work_layer[j, used]
        for j, target in enumerate(targets):
            if target is None:
                key = tuple(rows.keys[j].tolist())
                work[where, after[j], key[1]] += extra_transfer[key]
                work_layer[after[j], key[1]] = key[0]
                unmatched[after[j]] = True
            else:
                exchange[where, target] = rows.exchange_ns[:, j]
                sent[where, target] = rows.sent_bytes[:, j]
        matched = [target for target in targets if target is not None]
        for earlier, later in zip(matched, matched[1:], strict=False):
            if later < earlier:  # this class met the exchanges in another order
                unmatched[[earlier, later]] = True
    return GroupSequence(
        ep_group=ep_group,
        ep_size=ep_size,
        ranks=np.array([ranks[m] for m in members], dtype=np.int64),
        left_out_ranks=left_out,
        keys=_with_tail(keys),
        work_ns=work,
        exchange_ns=exchange,
        sent_bytes=sent,
        gemm_rows=gemm_rows,
        work_layer=work_layer,
        unmatched=unmatched,
    )


def _comparable(classes: list[_Rows]) -> list[_Rows]:
    """Classes that hold at least half of the exchanges that most ranks hold; the rest is a truncated step."""
    holders: dict[tuple[int, ...], int] = {}
    for rows in classes:
        for key in map(tuple, rows.keys.tolist()):
            holders[key] = holders.get(key, 0) + len(rows.members)
    num_ranks = sum(len(rows.members) for rows in classes)
    usual = {key for key, count in holders.items() if 2 * count > num_ranks}
    kept = [
        rows for rows in classes if 2 * len(usual.intersection(map(tuple, rows.keys.tolist()))) >= len(usual)
    ]
    return kept or classes


def _extra_transfers(classes: list[_Rows], common: set[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Shortest duration of every exchange that is not common to all ranks."""
    shortest: dict[tuple[int, ...], int] = {}
    for rows in classes:
        for j, key in enumerate(map(tuple, rows.keys.tolist())):
            if key not in common:
                least = int(rows.exchange_ns[:, j].min())
                shortest[key] = min(shortest.get(key, least), least)
    return shortest


def _next_common(targets: list[int | None], tail: int) -> list[int]:
    """For each segment of a class (and its tail): the common exchange that its work leads to."""
    after = [tail]
    for target in reversed(targets):
        after.append(after[-1] if target is None else target)
    return after[::-1]
