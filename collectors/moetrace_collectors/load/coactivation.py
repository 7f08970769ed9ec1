"""Which experts serve the same tokens: within a layer, and from one MoE layer to the next. Pure.

Input is routes [tokens, layers, top_k] of a sample of tokens (-1 where a slot holds no expert), or the
counted matrix itself. Counting goes block by block over tokens, so memory is that of the matrices, not of
the routes. Two experts that share tokens save a copy of the row where they share a node or a rank (under a
dispatch that sends one copy per node), and cost one where they do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.expert_map import Placement
from moetrace_collectors.model import FloatArray, IntArray

BLOCK_PAIRS = 1 << 22
"""Pairs counted at once (32 MiB of indices)."""
MAX_CELLS = 1 << 27
"""Cells of one matrix over all layers (1 GiB of counts)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoActivation:
    """Tokens that two experts share, counted over a sample."""

    within: IntArray
    """[L, E, E], symmetric, 0 on the diagonal: tokens whose top-k holds both."""
    across: IntArray | None
    """[L - 1, E, E]: tokens that visit the first in layer l, the second in layer l + 1; None if unknown."""
    tokens: int
    """Tokens in the sample; 0 where only the matrix is known."""


def count_coactivation(routes: npt.NDArray[np.integer], *, num_experts: int) -> CoActivation:
    """Matrices of routes [tokens, layers, top_k].

    Raises:
        UsageError: not such an array, an id that is no expert, or matrices that do not fit.
    """
    if routes.ndim != 3 or 0 in routes.shape or not np.issubdtype(routes.dtype, np.integer):
        raise UsageError(
            f"routes of shape {list(routes.shape)}: integers [tokens, layers, top_k] expected, "
            "-1 for no expert"
        )
    if routes.min() < -1 or routes.max() >= num_experts:
        wrong = np.argwhere((routes < -1) | (routes >= num_experts))[0]
        raise UsageError(
            f"routes{[int(i) for i in wrong]} = {int(routes[tuple(wrong)])}: an expert of 0 to "
            f"{num_experts - 1} expected, or -1 for none"
        )
    tokens, layers, top_k = routes.shape
    check_cells(layers, num_experts)
    within = np.zeros((layers, num_experts, num_experts), dtype=np.int64)
    across = np.zeros((layers - 1, num_experts, num_experts), dtype=np.int64)
    block = max(1, BLOCK_PAIRS // (top_k * top_k))
    for layer in range(layers):
        for start in range(0, tokens, block):
            here = routes[start : start + block, layer].astype(np.int64)
            within[layer] += _pairs(here, here, num_experts)
            if layer + 1 < layers:
                following = routes[start : start + block, layer + 1].astype(np.int64)
                across[layer] += _pairs(here, following, num_experts)
        np.fill_diagonal(within[layer], 0)
    return CoActivation(within=within, across=across, tokens=tokens)


def coactivation_of_matrix(matrix: npt.ArrayLike, *, num_experts: int) -> CoActivation:
    """From a counted matrix [layers, experts, experts].

    Raises:
        UsageError: not such a matrix, or one that is not symmetric, or has negative or broken values.
    """
    values = np.asarray(matrix)
    if values.ndim != 3 or values.shape[1:] != (num_experts, num_experts):
        raise UsageError(
            f"co-activation of shape {list(values.shape)}: [layers, {num_experts}, {num_experts}] expected"
        )
    check_cells(len(values), num_experts)
    if not np.isfinite(values).all() or (values < 0).any():
        raise UsageError("co-activation has negative, NaN or infinite values: counts of 0 or more expected")
    if not np.array_equal(values, values.transpose(0, 2, 1)):
        raise UsageError(
            "co-activation is not symmetric: tokens that hold a and b are those that hold b and a"
        )
    within = np.rint(values).astype(np.int64)
    within[:, np.arange(num_experts), np.arange(num_experts)] = 0
    return CoActivation(within=within, across=None, tokens=0)


def check_cells(layers: int, experts: int) -> None:
    """Refuse matrices that do not fit in memory.

    Raises:
        UsageError: names the sizes and the fix.
    """
    if layers * experts * experts > MAX_CELLS:
        raise UsageError(
            f"co-activation of {layers} layers x {experts} x {experts} experts: at most {MAX_CELLS} cells "
            "expected; give fewer layers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPair:
    """Two experts of one layer and the tokens that visit both."""

    layer: int
    first: int
    second: int
    tokens: int
    cross_node: float
    """Chance that the two rows of such a token go to different nodes, 0 to 1."""


def cross_node_share(pairs: CoActivation, placement: Placement, *, num_nodes: int) -> FloatArray:
    """[L]: part of all co-activated pairs whose two rows go to different nodes; 0.0 where there are none."""
    apart = _apart(placement, num_nodes)
    total = pairs.within.sum(axis=(1, 2)).astype(np.float64)
    crossing = (pairs.within * apart).sum(axis=(1, 2))
    share: FloatArray = np.divide(crossing, total, out=np.zeros_like(total), where=total > 0.0)
    return share


def apart_across(placement: Placement, *, num_nodes: int) -> FloatArray:
    """[L - 1, E, E]: chance that an expert, and one of the layer after it, sit on different nodes."""
    share = node_share(placement, num_nodes)
    apart: FloatArray = np.clip(1.0 - share[:-1] @ share[1:].transpose(0, 2, 1), 0.0, 1.0)
    return apart


def top_pairs(
    pairs: CoActivation, placement: Placement, *, num_nodes: int, count: int
) -> tuple[ExpertPair, ...]:
    """The pairs with the most tokens over all layers, and whether they cross nodes."""
    experts = pairs.within.shape[1]
    upper = np.triu(np.ones((experts, experts), dtype=np.bool_), k=1)
    flat = np.where(upper, pairs.within, -1).reshape(-1)
    best = np.argsort(-flat, kind="stable")[:count]
    apart = _apart(placement, num_nodes)
    found = []
    for cell in best[flat[best] > 0].tolist():
        layer, first, second = cell // experts**2, cell // experts % experts, cell % experts
        found.append(
            ExpertPair(
                layer=layer,
                first=first,
                second=second,
                tokens=int(pairs.within[layer, first, second]),
                cross_node=float(apart[layer, first, second]),
            )
        )
    return tuple(found)


def node_share(placement: Placement, num_nodes: int) -> FloatArray:
    """[L, E, N]: part of an expert's load that each node gets."""
    share = placement.share
    by_node: FloatArray = share.reshape(*share.shape[:2], num_nodes, -1).sum(axis=-1)
    return by_node


def _apart(placement: Placement, num_nodes: int) -> FloatArray:
    """[L, E, E]: chance that replicas chosen independently sit on different nodes."""
    share = node_share(placement, num_nodes)
    apart: FloatArray = np.clip(1.0 - share @ share.transpose(0, 2, 1), 0.0, 1.0)
    return apart


def _pairs(first: IntArray, second: IntArray, num_experts: int) -> IntArray:
    """[t, k], [t, k] -> [E, E]: how often ids stand in the same token."""
    left = np.broadcast_to(first[:, :, None], (*first.shape, second.shape[1]))
    right = np.broadcast_to(second[:, None, :], left.shape)
    known = (left >= 0) & (right >= 0)
    cells = np.bincount((left * num_experts + right)[known], minlength=num_experts * num_experts)
    counted: IntArray = cells.reshape(num_experts, num_experts)
    return counted
