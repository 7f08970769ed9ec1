"""Phase rows of many ranks -> exchanges, and the local work before each. All ranks of a step at once.

First stage of the verdict (pure). Rows of all ranks are laid end to end and summed into cells
(rank, segment, phase); a segment is what lies between two exchanges of one rank. Ranks with the same
exchanges in the same order form a class, whatever local rows each has recorded in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import IntArray, PhaseColumns, RankStep
from moetrace_collectors.verdict.overlap import exposed_durations, exposed_durations_of
from moetrace_collectors.verdict.sequence import (
    EXCHANGE_CODES,
    GEMM_CODE,
    KEY_COLUMNS,
    NUM_PHASES,
    TAIL_LAYER,
    UNKNOWN,
    BoolArray,
)
from moetrace_schemas.columns import RowFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRows:
    """Ranks M with the same B exchanges in the same order; the last segment is the tail."""

    ranks: IntArray
    """[M], ascending."""
    keys: IntArray
    """[B, 5]"""
    work_ns: IntArray
    """[M, B + 1, P]"""
    exchange_ns: IntArray
    """[M, B]"""
    sent_bytes: IntArray
    """[M, B]"""
    gemm_rows: IntArray
    """[M, B + 1]"""
    work_layer: IntArray
    """[B + 1, P]"""

    def take(self, chosen: BoolArray) -> ClassRows:
        """The class cut down to some of its ranks."""
        return ClassRows(
            ranks=self.ranks[chosen],
            keys=self.keys,
            work_ns=self.work_ns[chosen],
            exchange_ns=self.exchange_ns[chosen],
            sent_bytes=self.sent_bytes[chosen],
            gemm_rows=self.gemm_rows[chosen],
            work_layer=self.work_layer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatRows:
    """Rows of several ranks end to end."""

    owner: IntArray
    """Position of the row's rank among the ranks."""
    columns: dict[str, IntArray]
    is_exchange: BoolArray
    segment: IntArray
    """Exchanges of the same rank before the row; a row that is an exchange ends this segment."""

    def of(self, chosen: BoolArray) -> _FlatRows:
        """Some of the rows."""
        return _FlatRows(
            owner=self.owner[chosen],
            columns={name: column[chosen] for name, column in self.columns.items()},
            is_exchange=self.is_exchange[chosen],
            segment=self.segment[chosen],
        )


def class_rows(by_rank: dict[int, list[RankStep]]) -> list[ClassRows]:
    """The ranks in classes of identical exchanges, the largest class first."""
    ranks = np.array(sorted(by_rank), dtype=np.int64)
    alone = np.array([all(r.ep_size <= 1 for r in by_rank[rank]) for rank in ranks.tolist()])
    columns = [_merge(by_rank[rank]) for rank in ranks.tolist()]
    if not alone.any() and _are_uniform(columns):
        return [_sum_uniform_rows(ranks, columns)]
    flat = _flatten(columns, alone)
    members: dict[bytes, list[int]] = {}
    keys = np.stack([flat.columns[name][flat.is_exchange] for name in KEY_COLUMNS], axis=1)
    counts = np.bincount(flat.owner[flat.is_exchange], minlength=len(ranks))
    stops = np.cumsum(counts)
    for position, (stop, count) in enumerate(zip(stops.tolist(), counts.tolist(), strict=True)):
        members.setdefault(keys[stop - count : stop].tobytes(), []).append(position)
    classes = sorted(members.values(), key=lambda positions: (-len(positions), positions[0]))
    if len(classes) == 1:
        return [_sum_rows(ranks, flat)]
    summed = []
    for positions in classes:
        place = np.full(len(ranks), UNKNOWN, dtype=np.int64)
        place[positions] = np.arange(len(positions))
        chosen = flat.of(place[flat.owner] != UNKNOWN)
        chosen.owner[:] = place[chosen.owner]
        summed.append(_sum_rows(ranks[positions], chosen))
    return summed


def _merge(rank_steps: list[RankStep]) -> PhaseColumns:
    """One rank's rows in order of start; several records of one rank are its microbatches."""
    if len(rank_steps) == 1:
        return rank_steps[0].phases
    # One rank's records share one clock, so ordering them by start is no comparison across ranks.
    starts = np.concatenate([r.start_unix_ns + r.phases.start_offset_ns for r in rank_steps])
    order = np.argsort(starts, kind="stable")
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
    merged["start_offset_ns"] = starts[order] - min(r.start_unix_ns for r in rank_steps)
    return PhaseColumns(**merged)


def _are_uniform(ranks: Sequence[PhaseColumns]) -> bool:
    """Whether all ranks have recorded the same rows, durations and sizes apart."""
    if len({len(rows) for rows in ranks}) != 1:
        return False
    for name in (*KEY_COLUMNS, "flags"):
        first = getattr(ranks[0], name)
        # Mostly one array that the decoder has found in all of them (phase_shapes).
        others = [column for rows in ranks[1:] if (column := getattr(rows, name)) is not first]
        if others and not (np.stack(others) == first).all():
            return False
    return True


def _sum_uniform_rows(ranks: IntArray, columns: Sequence[PhaseColumns]) -> ClassRows:
    """The usual case, twice as fast: what is where is found once, on the rows of one rank."""
    flat = _flatten(columns[:1], np.zeros(1, dtype=np.bool_))
    one = _sum_rows(ranks[:1], flat)
    num_segments = len(one.keys) + 1
    is_exchange, local = flat.is_exchange, ~flat.is_exchange
    durations = exposed_durations_of(columns)
    cell = flat.segment[local] * NUM_PHASES + flat.columns["phase"][local]
    work = _sum_by_cell(durations[:, local], cell, num_segments * NUM_PHASES)

    is_gemm = flat.columns["phase"] == GEMM_CODE
    rows = np.stack([of_rank.rows[is_gemm] for of_rank in columns])
    segment: IntArray = flat.segment[is_gemm]
    told = _sum_by_cell((rows >= 0).astype(np.int64), segment, num_segments) > 0
    gemm_rows = _sum_by_cell(np.maximum(rows, 0), segment, num_segments)
    return ClassRows(
        ranks=ranks,
        keys=one.keys,
        work_ns=work.reshape(len(ranks), num_segments, NUM_PHASES),
        exchange_ns=durations[:, is_exchange],
        sent_bytes=np.stack([of_rank.bytes[is_exchange] for of_rank in columns]),
        gemm_rows=np.where(told, gemm_rows, UNKNOWN),
        work_layer=one.work_layer,
    )


def _sum_by_cell(values: IntArray, cell: IntArray, num_cells: int) -> IntArray:
    """Sums over the last axis by cell: [M, n] -> [M, num_cells]."""
    sums = np.zeros((len(values), num_cells), dtype=np.int64)
    if len(cell):
        order = np.argsort(cell, kind="stable")
        ordered = cell[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        sums[:, ordered[starts]] = np.add.reduceat(values[:, order], starts, axis=1)
    return sums


def _flatten(ranks: Sequence[PhaseColumns], alone: BoolArray) -> _FlatRows:
    lengths = np.array([len(rows) for rows in ranks], dtype=np.int64)
    owner = np.repeat(np.arange(len(ranks)), lengths)
    columns = {
        name: np.concatenate([getattr(rows, name) for rows in ranks])
        for name in (*KEY_COLUMNS, "flags", "bytes", "rows")
    }
    columns["exposed_ns"] = np.concatenate([exposed_durations(rows) for rows in ranks])
    is_exchange = _exchange_rows(owner, columns) & ~alone[owner]
    # Exchanges before each row, over all ranks; then less those of the ranks before its own.
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(is_exchange)])
    segment: IntArray = before[:-1] - before[np.cumsum(lengths) - lengths][owner]
    return _FlatRows(owner=owner, columns=columns, is_exchange=is_exchange, segment=segment)


def _exchange_rows(owner: IntArray, columns: dict[str, IntArray]) -> BoolArray:
    """Which rows are exchanges: those flagged BARRIER.

    Foreign senders may not know the flag: where no row of a rank's (layer, phase) has it, every dispatch and
    combine row of that (layer, phase) is an exchange.
    """
    flagged: BoolArray = (columns["flags"] & int(RowFlag.BARRIER)) != 0
    unflagged = ~flagged & np.isin(columns["phase"], EXCHANGE_CODES)
    if not unflagged.any():
        return flagged
    layer = columns["layer"] - columns["layer"].min()
    place: IntArray = (owner * (layer.max() + 1) + layer) * NUM_PHASES + columns["phase"]
    knows_flag = np.zeros(int(place.max()) + 1, dtype=np.bool_)
    knows_flag[place[flagged]] = True
    exchanges: BoolArray = flagged | (unflagged & ~knows_flag[place])
    return exchanges


def _sum_rows(ranks: IntArray, flat: _FlatRows) -> ClassRows:
    """Sum the rows of one class; its ranks all have as many exchanges."""
    num_ranks = len(ranks)
    exchanges = {name: flat.columns[name][flat.is_exchange] for name in (*KEY_COLUMNS, "exposed_ns", "bytes")}
    num_exchanges = int(flat.is_exchange.sum()) // num_ranks
    keys = np.stack([exchanges[name][:num_exchanges] for name in KEY_COLUMNS], axis=1).astype(np.int64)
    local = ~flat.is_exchange
    segment, phase = flat.segment[local], flat.columns["phase"][local]

    work = np.zeros((num_ranks, num_exchanges + 1, NUM_PHASES), dtype=np.int64)
    np.add.at(work, (flat.owner[local], segment, phase), flat.columns["exposed_ns"][local])

    work_layer = np.full((num_exchanges + 1, NUM_PHASES), TAIL_LAYER, dtype=np.int64)
    work_layer[:-1] = keys[:, :1]
    work_layer[segment, phase] = flat.columns["layer"][local]

    rows = flat.columns["rows"][local]
    counted = (phase == GEMM_CODE) & (rows >= 0)
    where = (flat.owner[local][counted], segment[counted])
    gemm_rows = np.full((num_ranks, num_exchanges + 1), UNKNOWN, dtype=np.int64)
    gemm_rows[where] = 0
    np.add.at(gemm_rows, where, rows[counted])
    return ClassRows(
        ranks=ranks,
        keys=keys,
        work_ns=work,
        exchange_ns=exchanges["exposed_ns"].reshape(num_ranks, num_exchanges),
        sent_bytes=exchanges["bytes"].reshape(num_ranks, num_exchanges),
        gemm_rows=gemm_rows,
        work_layer=work_layer,
    )
