"""Rows and bytes from rank to rank, what leaves the node, and how many experts each rank touches. Pure.

Where exchanges were recorded they are used. Where only counts per source rank are known, rows are sent
through the placement. A count per expert alone does not tell sources, and then nothing is made up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrace_collectors.load.expert_map import EMPTY, Placement
from moetrace_collectors.load.figures import max_mean_ratio
from moetrace_collectors.model import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Communication:
    """Dispatch between R ranks of an expert-parallel group (groups of one run are summed)."""

    rows: FloatArray
    """[L, R, R]: rows from source to destination."""
    bytes: FloatArray | None
    """[L, R, R]; None where the size of a row is not known."""
    measured: bool
    """Recorded exchanges (True), or counts sent through the placement."""

    def received(self) -> FloatArray:
        """[L, R]: rows that each destination received from other ranks."""
        arrived: FloatArray = _without_self(self.rows).sum(axis=1)
        return arrived

    def received_ratio(self) -> FloatArray:
        """[L]: max / mean over destinations of the rows received from other ranks."""
        return max_mean_ratio(self.received())

    def cross_node_ratio(self, num_nodes: int) -> FloatArray:
        """[L]: part of the rows that leave their node; 0.0 where nothing was sent."""
        ranks = self.rows.shape[1]
        node = np.arange(ranks) * num_nodes // ranks
        crossing = (self.rows * (node[:, None] != node[None, :])).sum(axis=(1, 2))
        total = self.rows.sum(axis=(1, 2))
        ratio: FloatArray = np.divide(crossing, total, out=np.zeros_like(total), where=total > 0.0)
        return ratio


def communication_through(
    source_counts: FloatArray, placement: Placement, *, row_bytes: float | None
) -> Communication:
    """Counts per source rank [L, R, E] sent through the placement; replicas share alike."""
    rows = np.einsum("lse,ler->lsr", source_counts, placement.share, optimize=True)
    return Communication(rows=rows, bytes=None if row_bytes is None else rows * row_bytes, measured=False)


def activated_experts(steps: FloatArray, placement: Placement) -> FloatArray:
    """[S, L, E] -> [L, R]: slots per rank that get any row in a step, mean over steps.

    In decode, where few rows meet many experts, time follows this figure and not rows: every activated
    expert's weights are read once. An expert with fewer rows than replicas activates that many of them.
    """
    slots = np.where(placement.physical_to_logical == EMPTY, 0, placement.physical_to_logical)
    chance = np.minimum(steps / placement.replica_counts, 1.0).mean(axis=0)
    by_slot = np.take_along_axis(chance, slots, axis=1) * (placement.physical_to_logical != EMPTY)
    activated: FloatArray = by_slot.reshape(len(slots), placement.num_ranks, -1).sum(axis=-1)
    return activated


def _without_self(rows: FloatArray) -> FloatArray:
    return rows * ~np.eye(rows.shape[1], dtype=np.bool_)
