"""Rows of the experts' work where its intervals do not tell them: from the counts of rows received (pure).

A sender may count what its experts received without knowing which interval worked on it. A layer's count is
then that of its only interval, or shared evenly by several (microbatches) of one direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moetrace_collectors.model import RankStep
from moetrace_collectors.verdict.sequence import GEMM_CODE, GroupSequence
from moetrace_schemas.enums import COUNT_KIND_CODE, CountKind

RECEIVED = COUNT_KIND_CODE[CountKind.RECEIVED]
_DIRECTION = 2
"""Column of the direction in an exchange's key."""


def with_received_rows(sequence: GroupSequence, by_rank: dict[int, list[RankStep]]) -> GroupSequence:
    """The sequence with unknown rows filled in where the rank has counted what it received."""
    worked = sequence.work_ns[:, :, GEMM_CODE] > 0
    unknown = worked & (sequence.gemm_rows < 0)
    if not unknown.any():
        return sequence
    gemm_rows = sequence.gemm_rows.copy()
    layers, directions = sequence.work_layer[:, GEMM_CODE], sequence.keys[:, _DIRECTION]
    for place, rank in enumerate(sequence.ranks.tolist()):
        if not unknown[place].any():
            continue
        for layer, rows in _received_by_layer(by_rank[rank]).items():
            for direction in np.unique(directions):
                cells = np.flatnonzero(worked[place] & (layers == layer) & (directions == direction))
                if len(cells) and unknown[place, cells].all():
                    gemm_rows[place, cells] = rows // len(cells)
    return replace(sequence, gemm_rows=gemm_rows)


def _received_by_layer(rank_steps: Sequence[RankStep]) -> dict[int, int]:
    received: dict[int, int] = {}
    for rank_step in rank_steps:
        for row in rank_step.experts:
            if row.kind == RECEIVED:
                received[row.layer] = received.get(row.layer, 0) + int(row.counts.sum())
    return received
