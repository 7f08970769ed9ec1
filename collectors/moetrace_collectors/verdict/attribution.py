"""Who extended the step: extensions summed by (rank, phase) first, the layer only where one holds half.

Third stage of the verdict (pure). A fault in every layer is a fault of the rank and not of a layer, so sums
over the whole step are compared, and a layer is named only afterwards::

    extension by layer         0    1    2    3     sum
    (rank 1, expert_gemm)      -    9    1    -      10     layer 1 holds 9 of 10: named
    (rank 0, permute)          4    4    4    4      16     the suspect; no layer holds 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import FloatArray, IntArray, Suspect
from moetrace_collectors.verdict.frontier import GroupFrontier
from moetrace_collectors.verdict.sequence import NUM_PHASES, TAIL_LAYER
from moetrace_schemas.enums import PHASE_BY_CODE

LAYER_SHARE = 0.5
"""Part of a suspect's worth that one layer must hold to be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Extensions of one step by rank and phase, over all groups."""

    frontiers: tuple[GroupFrontier, ...]
    ranks: IntArray
    """[R], ascending."""
    worth_ns: IntArray
    """[R, P]: summed extension of the exchanges that the rank released with that phase."""
    confirmed_ns: FloatArray
    """[R, P]: the part of it that waits confirm."""
    deviation_ns: FloatArray
    """[R, P]: work minus the group's mean, summed with its sign: noise cancels, faults add up."""
    group_of: IntArray
    """[R]: index into `frontiers`."""

    def suspect(self, index: int, phase: int) -> Suspect:
        """The record for one cell of `worth_ns`; its share is of its own group's extensions."""
        frontier = self.frontiers[int(self.group_of[index])]
        worth = int(self.worth_ns[index, phase])
        total = int(frontier.extension_ns.sum())
        return Suspect(
            rank=int(self.ranks[index]),
            phase=PHASE_BY_CODE[phase],
            layer=self._layer(frontier, index, phase),
            worth_ns=worth,
            share=worth / total if total else 0.0,
        )

    def shadow_of(self, index: int, phase: int) -> Suspect | None:
        """The rank that would have released the suspect's exchanges had the suspect been average there.

        An extension names one rank per exchange, so a second rank that is late at the same ones stays in
        the shadow of the first, however close it is::

            rank 1  |======== 80 ========|       extension of the exchange: all rank 1's
            rank 6  |======= 78 ========|~|      fixing rank 1 alone gives back 2
            rank 3  |== 20 ==|~~~~~~~~~~~~|

        Its worth is its own work above the mean, summed over these exchanges.
        """
        frontier, place, barriers = self.barriers_of(index, phase)
        above = frontier.total_work_ns[:, barriers] - frontier.mean_work_ns[barriers]
        above[place] = 0
        shadows = np.maximum(above, 0).sum(axis=1)
        second = int(shadows.argmax())
        if shadows[second] <= 0:
            return None
        work = frontier.sequence.work_ns[:, barriers].sum(axis=1)
        total = int(frontier.extension_ns.sum())
        return Suspect(
            rank=int(frontier.sequence.ranks[second]),
            phase=PHASE_BY_CODE[int((work[second] - work.mean(axis=0)).argmax())],
            layer=None,
            worth_ns=int(shadows[second]),
            share=int(shadows[second]) / total if total else 0.0,
        )

    def barriers_of(self, index: int, phase: int) -> tuple[GroupFrontier, int, IntArray]:
        """The group's frontier, the rank's place in it, and the exchanges that this cell sums."""
        frontier = self.frontiers[int(self.group_of[index])]
        place = int(np.searchsorted(frontier.sequence.ranks, self.ranks[index]))
        return (
            frontier,
            place,
            np.flatnonzero((frontier.critical == place) & (frontier.work_phase == phase) & frontier.told),
        )

    def _layer(self, frontier: GroupFrontier, index: int, phase: int) -> int | None:
        """The layer that holds half of a cell's worth; the work of a step of one layer is that layer's."""
        _, _, barriers = self.barriers_of(index, phase)
        if not len(barriers):
            return None
        layers, place = np.unique(frontier.sequence.work_layer[barriers, phase], return_inverse=True)
        by_layer = np.bincount(place, frontier.extension_ns[barriers])
        largest = int(by_layer.argmax())
        named = layers[largest] != TAIL_LAYER and by_layer[largest] >= LAYER_SHARE * by_layer.sum() > 0
        return int(layers[largest]) if named else None


def blame(frontiers: Sequence[GroupFrontier]) -> Blame:
    """Sum the extensions of every group's exchanges by (rank, phase)."""
    worth = [_by_rank_and_phase(f, (f.extension_ns * f.told).astype(np.float64)) for f in frontiers]
    confirmed = [
        _by_rank_and_phase(f, f.extension_ns * f.confirmed * f.told * ~f.sequence.unmatched)
        for f in frontiers
    ]
    deviation = [_deviation(frontier) for frontier in frontiers]
    ranks = np.concatenate([frontier.sequence.ranks for frontier in frontiers])
    group_of = np.repeat(np.arange(len(frontiers)), [len(frontier.sequence.ranks) for frontier in frontiers])
    order = np.argsort(ranks, kind="stable")
    return Blame(
        frontiers=tuple(frontiers),
        ranks=ranks[order],
        worth_ns=np.concatenate(worth)[order].astype(np.int64),
        confirmed_ns=np.concatenate(confirmed)[order],
        deviation_ns=np.concatenate(deviation)[order],
        group_of=group_of[order],
    )


def _by_rank_and_phase(frontier: GroupFrontier, values: FloatArray) -> FloatArray:
    num_ranks = len(frontier.sequence.ranks)
    cell = frontier.critical * NUM_PHASES + frontier.work_phase
    summed = np.bincount(cell, values, num_ranks * NUM_PHASES).astype(np.float64)
    return summed.reshape(num_ranks, NUM_PHASES)


def _deviation(frontier: GroupFrontier) -> FloatArray:
    by_phase = frontier.sequence.work_ns.sum(axis=1)
    deviation: FloatArray = by_phase - by_phase.mean(axis=0)
    return deviation
