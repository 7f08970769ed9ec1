"""What it takes to get from one placement to another: copies of experts, bytes, seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moetrace_collectors.load.expert_map import Placement
from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.placement.topology import Topology

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """Copying experts' weights to ranks that do not hold them yet."""

    copies: int
    """Experts that a rank has to fetch, over all layers."""
    bytes: float
    seconds: float
    """All ranks at once at the links' full speed, the slowest rank; nothing else runs meanwhile."""


def copies_needed(today: Placement, planned: Placement) -> IntArray:
    """[L, R]: experts that each rank must fetch; a second replica beside one that is there costs nothing."""
    needed: IntArray = _to_fetch(today, planned).sum(axis=1)
    return needed


def migration(today: Placement, planned: Placement, *, topology: Topology, expert_bytes: float) -> Migration:
    """Cost of the move, each expert fetched from its nearest holders, who share the work.

    ::

        seconds = max over ranks of max(in, out)
        in      = near bytes / node_gb_per_s + far bytes / link_gb_per_s
    """
    fetch = _to_fetch(today, planned)
    holds = today.replicas_on_rank > 0
    layers, experts, ranks = fetch.shape
    nodes = topology.num_nodes
    by_node = (layers, experts, nodes, ranks // nodes)
    holders = holds.reshape(by_node).sum(axis=3)  # [L, E, N]
    near_holders = np.repeat(holders, ranks // nodes, axis=2)
    is_near = fetch & (near_holders > 0)
    is_far = fetch & (near_holders == 0)
    intake = (
        is_near.sum(axis=(0, 1)) / topology.node_gb_per_s + is_far.sum(axis=(0, 1)) / topology.link_gb_per_s
    )
    asked_near = is_near.reshape(by_node).sum(axis=3)
    near_part = np.divide(asked_near, holders, out=np.zeros(holders.shape), where=holders > 0)
    far_part = is_far.sum(axis=2) / np.maximum(holds.sum(axis=2), 1)
    given_near = (holds * np.repeat(near_part, ranks // nodes, axis=2)).sum(axis=(0, 1))
    given_far = (holds * far_part[:, :, None]).sum(axis=(0, 1))
    output = given_near / topology.node_gb_per_s + given_far / topology.link_gb_per_s
    slowest = float(np.maximum(intake, output).max())
    copies = int(fetch.sum())
    return Migration(copies=copies, bytes=copies * expert_bytes, seconds=slowest * expert_bytes / 1e9)


def rename_ranks(planned: Placement, today: Placement, *, num_nodes: int) -> Placement:
    """The same placement with ranks of each layer renamed so that most experts stay where they are.

    Whole nodes are renamed first, then ranks within them, so loads and network copies stay what they are.
    Pairs are matched greedily by the experts that they share.
    """
    layers, ranks = planned.num_layers, planned.num_ranks
    per_node = ranks // num_nodes
    shared = _shared(planned.replicas_on_rank > 0, today.replicas_on_rank > 0)  # [L, new rank, old rank]
    by_node = shared.reshape(layers, num_nodes, per_node, num_nodes, per_node)
    node_of = _match(by_node.sum(axis=(2, 4)))
    new_rank = np.empty((layers, ranks), dtype=np.int64)
    at = np.arange(layers)
    for node in range(num_nodes):
        old_node = node_of[:, node]
        within = by_node[at, node, :, old_node, :]
        new_rank[:, node * per_node : (node + 1) * per_node] = old_node[:, None] * per_node + _match(within)
    blocks = planned.physical_to_logical.reshape(layers, ranks, -1)
    renamed = np.empty_like(blocks)
    np.put_along_axis(renamed, new_rank[:, :, None], blocks, axis=1)
    return Placement(
        physical_to_logical=renamed.reshape(layers, -1),
        num_experts=planned.num_experts,
        num_ranks=ranks,
    )


def _to_fetch(today: Placement, planned: Placement) -> BoolArray:
    return (planned.replicas_on_rank > 0) & ~(today.replicas_on_rank > 0)


def _shared(first: BoolArray, second: BoolArray) -> FloatArray:
    """[L, E, R] twice -> [L, R, R]: experts that both hold."""
    both = first.astype(np.float32).transpose(0, 2, 1) @ second.astype(np.float32)
    return both.astype(np.float64)


def _match(score: FloatArray) -> IntArray:
    """[L, n, n] -> [L, n]: for each row its column, one to one, the highest scores first."""
    layers, n, _ = score.shape
    left = score.copy()
    chosen = np.empty((layers, n), dtype=np.int64)
    at = np.arange(layers)
    for _ in range(n):
        best = left.reshape(layers, -1).argmax(axis=1)
        row, column = best // n, best % n
        chosen[at, row] = column
        left[at, row, :] = -1.0
        left[at, :, column] = -1.0
    return chosen
