"""EPLB's two policies, written from their published description (the EPLB README). Pure.

Hierarchical, where the router's expert groups divide by the nodes: pack groups to nodes by load, replicate
experts within each node, pack the replicas to the node's ranks. Global otherwise: replicate over all slots,
pack the replicas to all ranks. Both replicate the expert whose replicas carry most, and pack longest first
into the lightest rank with room.
"""

from __future__ import annotations

import numpy as np

from moetrace_collectors.load.expert_map import Placement
from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.placement.packing import arrange, pack, replicate
from moetrace_collectors.placement.problem import PlanProblem


class EplbPlanner:
    """The published algorithm; the one to beat."""

    name = "eplb"

    def plan(self, problem: PlanProblem) -> Placement:
        """See Planner."""
        return eplb_placement(
            problem.loads,
            num_slots=problem.num_slots,
            num_ranks=problem.topology.num_ranks,
            num_nodes=problem.topology.num_nodes,
            num_groups=problem.num_groups,
        )


def eplb_placement(
    loads: FloatArray, *, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int
) -> Placement:
    """[L, E] -> the placement; slots divide by ranks, ranks by nodes, experts by groups."""
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    return Placement(
        physical_to_logical=_hierarchical(loads, num_slots, num_ranks, num_nodes, num_groups),
        num_experts=loads.shape[1],
        num_ranks=num_ranks,
    )


def _hierarchical(
    loads: FloatArray, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int
) -> IntArray:
    layers, experts = loads.shape
    group_size = experts // num_groups
    by_group = loads.reshape(layers, num_groups, group_size).sum(axis=2)
    groups = np.broadcast_to(np.arange(num_groups), (layers, num_groups))
    groups_by_node = arrange(groups, *pack(by_group, num_nodes), num_nodes)
    # Experts in the order of their nodes: [L, N, E/N], and layers x nodes as one batch from here on.
    ordered = (groups_by_node[:, :, None] * group_size + np.arange(group_size)).reshape(layers, experts)
    of_node = ordered.reshape(layers * num_nodes, -1)
    node_loads = np.take_along_axis(loads, ordered, axis=1).reshape(layers * num_nodes, -1)
    slots, counts = replicate(node_loads, num_slots // num_nodes)
    weights = np.take_along_axis(node_loads / counts, slots, axis=1)
    ranks_per_node = num_ranks // num_nodes
    packed = arrange(slots, *pack(weights, ranks_per_node), ranks_per_node)
    return np.take_along_axis(of_node, packed, axis=1).reshape(layers, num_slots)
