"""Exchanges matched across the ranks of a group, by key and never by position.

First stage of the verdict (pure), second half: (layer, phase, direction, microbatch, ordinal) names an
exchange on every rank, whatever else a rank has recorded before it.
"""

from __future__ import annotations

import itertools

import numpy as np

from moetrace_collectors.model import IntArray, JoinedStep, RankStep
from moetrace_collectors.verdict.received import with_received_rows
from moetrace_collectors.verdict.rows import ClassRows, class_rows
from moetrace_collectors.verdict.sequence import (
    KEY_COLUMNS,
    NUM_PHASES,
    OUTSIDE_CODE,
    TAIL_LAYER,
    UNKNOWN,
    GroupSequence,
)

Key = tuple[int, ...]
"""The key columns of an exchange and its occurrence among equal ones."""


def group_sequences(joined: JoinedStep) -> tuple[GroupSequence, ...]:
    """Sequences of every EP group of a joined step, in ascending order of group."""
    by_rank: dict[int, list[RankStep]] = {}
    groups: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for rank_step in joined.rank_steps:
        by_rank.setdefault(rank_step.rank, []).append(rank_step)
        group = rank_step.ep_group
        groups.setdefault(group, set()).add(rank_step.rank)
        sizes[group] = max(sizes.get(group, 0), rank_step.ep_size)
    classes = class_rows(by_rank)  # over all groups at once: they mostly record the same rows
    sequences = [_group_sequence(group, sizes[group], groups[group], classes) for group in sorted(groups)]
    return tuple(with_received_rows(sequence, by_rank) for sequence in sequences)


def _group_sequence(ep_group: int, ep_size: int, ranks: set[int], classes: list[ClassRows]) -> GroupSequence:
    members = np.array(sorted(ranks), dtype=np.int64)
    parts = []
    for rows in classes:
        chosen = np.isin(rows.ranks, members)
        if chosen.any():
            parts.append(rows if chosen.all() else rows.take(chosen))
    if len(parts) == 1:
        return _from_one_class(ep_group, ep_size, parts[0])
    parts.sort(key=lambda rows: -len(rows.ranks))
    return _from_many_classes(ep_group, ep_size, parts)


def _from_one_class(ep_group: int, ep_size: int, rows: ClassRows) -> GroupSequence:
    members = len(rows.ranks)
    return GroupSequence(
        ep_group=ep_group,
        ep_size=ep_size,
        ranks=rows.ranks,
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


def _from_many_classes(ep_group: int, ep_size: int, classes: list[ClassRows]) -> GroupSequence:
    """Match exchanges by key where ranks did not record the same rows.

    An exchange that only some ranks have is no meeting point of the group. Its shortest duration was
    spent all the same, so it becomes local work of the ranks that have it, and the next common
    exchange is marked, since what led to it differs by more than work::

        rank 0   ==|k0|==|x|==|k1|        common: k0, k1
        rank 1   ==|k0|=======|k1|        k1 is unmatched; x counts as local work of rank 0
    """
    comparable = _comparable(classes)
    ranks = np.sort(np.concatenate([rows.ranks for rows in comparable]))
    all_ranks = np.concatenate([rows.ranks for rows in classes])
    common = set.intersection(*(set(_keys(rows)) for rows in comparable))
    reference = [key for key in _keys(comparable[0]) if key in common]
    position = {key: k for k, key in enumerate(reference)}

    num_barriers = len(reference) + 1
    work = np.zeros((len(ranks), num_barriers, NUM_PHASES), dtype=np.int64)
    exchange = np.zeros((len(ranks), num_barriers), dtype=np.int64)
    sent = np.full((len(ranks), num_barriers), UNKNOWN, dtype=np.int64)
    gemm_rows = np.full((len(ranks), num_barriers), UNKNOWN, dtype=np.int64)
    work_layer = np.full((num_barriers, NUM_PHASES), TAIL_LAYER, dtype=np.int64)
    unmatched = np.zeros(num_barriers, dtype=np.bool_)
    extra_transfers = _extra_transfers(comparable, common)
    for rows in reversed(comparable):  # the largest class last, so that its layers stand
        where = np.searchsorted(ranks, rows.ranks)
        targets = [position.get(key) for key in _keys(rows)]
        leads_to = _next_common(targets, num_barriers - 1)
        for j, k in enumerate(leads_to):
            work[where, k] += rows.work_ns[:, j]
            before, more = gemm_rows[where, k], rows.gemm_rows[:, j]
            gemm_rows[where, k] = np.where(more >= 0, np.maximum(before, 0) + more, before)
            used = rows.work_ns[:, j].any(axis=0)
            work_layer[k, used] = rows.work_layer[j, used]
        for j, (key, target) in enumerate(zip(_keys(rows), targets, strict=True)):
            if target is None:
                layer, phase = key[:2]
                work[where, leads_to[j], phase] += extra_transfers[key]
                work_layer[leads_to[j], phase] = layer
                unmatched[leads_to[j]] = True
            else:
                exchange[where, target] = rows.exchange_ns[:, j]
                sent[where, target] = rows.sent_bytes[:, j]
        for earlier, later in itertools.pairwise(target for target in targets if target is not None):
            if later < earlier:  # this class met the exchanges in another order
                unmatched[[earlier, later]] = True
    return GroupSequence(
        ep_group=ep_group,
        ep_size=ep_size,
        ranks=ranks,
        left_out_ranks=tuple(sorted(set(all_ranks.tolist()) - set(ranks.tolist()))),
        keys=_with_tail(np.array([key[:-1] for key in reference], dtype=np.int64)),
        work_ns=work,
        exchange_ns=exchange,
        sent_bytes=sent,
        gemm_rows=gemm_rows,
        work_layer=work_layer,
        unmatched=unmatched,
    )


def _keys(rows: ClassRows) -> list[Key]:
    """Keys of a class, each with its occurrence: a sender without ordinals repeats keys."""
    seen: dict[Key, int] = {}
    keys = []
    for key in map(tuple, rows.keys.tolist()):
        keys.append((*key, seen.get(key, 0)))
        seen[key] = seen.get(key, 0) + 1
    return keys


def _comparable(classes: list[ClassRows]) -> list[ClassRows]:
    """Classes that hold at least half of the exchanges that most ranks hold; the rest is a truncated step."""
    holders: dict[Key, int] = {}
    for rows in classes:
        for key in _keys(rows):
            holders[key] = holders.get(key, 0) + len(rows.ranks)
    num_ranks = sum(len(rows.ranks) for rows in classes)
    usual = {key for key, count in holders.items() if 2 * count > num_ranks}
    kept = [rows for rows in classes if 2 * len(usual.intersection(_keys(rows))) >= len(usual)]
    return kept or classes


def _extra_transfers(classes: list[ClassRows], common: set[Key]) -> dict[Key, int]:
    """Shortest duration of every exchange that is not common to all ranks."""
    shortest: dict[Key, int] = {}
    for rows in classes:
        least = rows.exchange_ns.min(axis=0).tolist()
        for key, duration in zip(_keys(rows), least, strict=True):
            if key not in common:
                shortest[key] = min(shortest.get(key, duration), duration)
    return shortest


def _next_common(targets: list[int | None], tail: int) -> list[int]:
    """For each segment of a class (and its tail): the common exchange that its work leads to."""
    leads_to = [tail]
    for target in reversed(targets):
        leads_to.append(leads_to[-1] if target is None else target)
    return leads_to[::-1]
