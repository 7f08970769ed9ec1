"""Time of a step from its rank loads: experts' GEMMs and the exchange around them. Pure.

Per layer and step, because every layer ends in an exchange that waits for the slowest rank::

    time     = passes x max over ranks of (start + per_row x rows) + exchanges x transfer
    transfer = max(longest intake of a rank inside its node, longest intake of a node over the network)

A forward pass is one pass and two exchanges (dispatch, combine); a training step works three times as much
and exchanges four times. Rows come evenly from all ranks (most recordings tell no sources). A dispatch that
sends one copy of a row per node, or per rank, moves fewer rows than (token, slot) pairs; how many fewer
follows from co-activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from moetrace_collectors.load.coactivation import CoActivation
from moetrace_collectors.load.series import GemmSamples
from moetrace_collectors.model import FloatArray
from moetrace_collectors.placement.topology import Topology
from moetrace_collectors.verdict.gemm_fit import robust_slope

Floats = npt.NDArray[np.floating[Any]]

MICROSECONDS_PER_ROW = 0.22
"""Assumed where no times are known: 3 x 2 x 7168 x 2048 FLOP at 400 TFLOP/s."""
ROW_BYTES = 7168.0
"""Assumed where not told: a row of 7168 one-byte values."""
MIN_SAMPLES = 16
MIN_SPREAD = 0.02
"""Samples whose rows spread less than this part of their mean tell no line."""


class Basis(StrEnum):
    """Where a figure comes from."""

    FITTED = "fitted"
    """From recorded rows and times."""
    GIVEN = "given"
    """By the user."""
    ASSUMED = "assumed"
    """A typical value; only ratios of times mean anything."""


class Copies(StrEnum):
    """How many copies of a token's row a dispatch sends."""

    PAIR = "pair"
    """One per chosen expert, as a plain all-to-all does."""
    RANK = "rank"
    """One per rank that holds any of them."""
    NODE = "node"
    """One per node over the network, then one per rank inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTime:
    """Time of a rank's experts in one layer and step: start + per_row x rows."""

    start_us: float
    us_per_row: float
    basis: Basis


def fit_gemm(samples: GemmSamples | None) -> GemmTime | None:
    """A line through recorded (rows, time), robust to slow devices; None where they tell none."""
    if samples is None or len(samples.rows) < MIN_SAMPLES:
        return None
    rows, times = samples.rows, samples.microseconds
    if rows.std() < MIN_SPREAD * rows.mean() or not np.isfinite(times).all():
        return None
    slope = float(robust_slope(rows[np.newaxis], times[np.newaxis])[0])
    if slope <= 0.0:
        return None
    start = max(float(np.median(times - slope * rows)), 0.0)
    return GemmTime(start_us=start, us_per_row=slope, basis=Basis.FITTED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCost:
    """Everything that turns loads under a placement into time."""

    topology: Topology
    gemm: GemmTime
    row_bytes: float = ROW_BYTES
    copies: Copies = Copies.NODE
    top_k: int | None = None
    num_groups: int = 1
    """Expert-parallel groups that share the recorded loads."""
    passes: float = 1.0
    """Experts' work of a step over that of its forward pass."""
    exchanges: float = 2.0
    """Exchanges of a layer and step."""

    def gemm_us(self, rank_loads: FloatArray) -> FloatArray:
        """[..., R] rows of all groups -> [...] microseconds of the fullest rank; 0 without rows."""
        fullest = rank_loads.max(axis=-1) / self.num_groups
        time: FloatArray = np.where(fullest > 0.0, self.gemm.start_us + self.gemm.us_per_row * fullest, 0.0)
        return time

    def transfer_us(self, loads: FloatArray, copies: FloatArray, pairs: CoActivation | None) -> FloatArray:
        """[..., L, E] loads, [L, E, R] parts that go to each rank -> [..., L]: one exchange, microseconds."""
        top_k = None if self.copies is Copies.PAIR else self.top_k
        by_rank = _to(loads, copies) * intake_parts(copies, loads, pairs, top_k)
        nodes = self.topology.num_nodes
        if nodes == 1:
            return self.slower(by_rank, np.zeros((*by_rank.shape[:-1], 1)))
        if self.copies is Copies.NODE:
            by_node_part = to_nodes(copies, nodes)
            by_node = _to(loads, by_node_part) * intake_parts(by_node_part, loads, pairs, top_k)
        else:
            by_node = by_rank.reshape(*by_rank.shape[:-1], nodes, -1).sum(axis=-1)
        return self.slower(by_rank, by_node)

    def slower(self, copies_to_rank: FloatArray, copies_to_node: FloatArray) -> FloatArray:
        """[..., R] and [..., N] copies of rows of all groups -> [...]: microseconds of the slower way."""
        topology = self.topology
        inside = 1.0 - 1.0 / topology.ranks_per_node
        outside = 1.0 - 1.0 / topology.num_nodes
        row = self.row_bytes / self.num_groups
        near = copies_to_rank.max(axis=-1) * inside * row / (topology.node_gb_per_s * 1e3)
        far = copies_to_node.max(axis=-1) * outside * row
        far = far / (topology.ranks_per_node * topology.link_gb_per_s * 1e3)
        slower: FloatArray = np.maximum(near, far)
        return slower

    def step_us(
        self,
        loads: FloatArray,
        share: FloatArray,
        pairs: CoActivation | None = None,
        *,
        copies: FloatArray | None = None,
    ) -> FloatArray:
        """Microseconds per layer of single steps.

        Args:
            loads: [..., L, E].
            share: [L, E, R]: part of an expert's work that each rank does (`Placement.share`).
            pairs: co-activation, where known.
            copies: [L, E, R]: part of an expert's rows that each rank receives, where that is not the share
                of the work (a sharded expert sends every row to each of its ranks).

        Returns:
            [..., L]
        """
        work = self.passes * self.gemm_us(_to(loads, share))
        return work + self.exchanges * self.transfer_us(loads, share if copies is None else copies, pairs)


def _to(loads: FloatArray, share: FloatArray) -> FloatArray:
    """[..., L, E] and [L, E, D] -> [..., L, D]."""
    arrived: FloatArray = np.einsum("...le,led->...ld", loads, share, optimize=True)
    return arrived


def to_nodes(share: FloatArray, num_nodes: int) -> FloatArray:
    """[L, E, R] -> [L, E, N]."""
    by_node: FloatArray = share.reshape(*share.shape[:2], num_nodes, -1).sum(axis=-1)
    return by_node


def intake_parts(
    share: FloatArray, loads: FloatArray, pairs: CoActivation | None, top_k: int | None
) -> FloatArray:
    """[L, E, D] -> [L, D]: copies that a destination gets per (token, slot) pair that goes there, 1/k to 1.

    A token whose k experts include several of one destination sends it one copy. Without a top-k that is not
    known, and every pair is a copy. Without co-activation experts count as chosen independently.
    """
    layers, _, destinations = share.shape
    if top_k is None or top_k < 2:
        return np.ones((layers, destinations))
    if pairs is None:
        total = loads.reshape(-1, *loads.shape[-2:]).sum(axis=0)
        to_destination = _to(total, share)
        chance = to_destination / np.maximum(total.sum(axis=-1, keepdims=True), 1e-300)
        touched = (1.0 - (1.0 - np.minimum(chance, 1.0)) ** top_k) / top_k
        return np.where(chance > 0.0, touched / np.maximum(chance, 1e-300), 1.0)
    within = pairs.within.astype(np.float64)
    # Every token of the sample is in k (k - 1) ordered pairs, k - 1 of them from each of its experts.
    visits = within.sum(axis=2) / (top_k - 1)
    single = _to(visits, share)
    double = 0.5 * (share * (within @ share)).sum(axis=1)
    return np.where(single > 0.0, union(single, double) / np.maximum(single, 1e-300), 1.0)


def union(single: Floats, double: Floats) -> Floats:
    """Tokens that touch a destination, from sums over its experts (S1) and over pairs of them (S2).

    ::

        j = 1 + floor(2 S2 / S1),    union >= 2 S1 / (j + 1) - 2 S2 / (j (j + 1))

    The best lower bound that pairs allow (Dawson and Sankoff, 1967); exact where every touching token has j
    or j + 1 experts there.
    """
    together = np.floor(2.0 * double / np.maximum(single, 1e-30)) + 1.0
    bound: Floats = 2.0 * single / (together + 1.0) - 2.0 * double / (together * (together + 1.0))
    return bound
