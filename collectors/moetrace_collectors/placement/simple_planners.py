"""The planners that everything else is measured against: in order, dealt out, and longest first. Pure."""

from __future__ import annotations

import numpy as np

from moetrace_collectors.load.expert_map import Placement, contiguous_placement
from moetrace_collectors.placement.packing import arrange, pack
from moetrace_collectors.placement.problem import PlanProblem


class ContiguousPlanner:
    """Experts in order over the slots, beginning again at expert 0; engines start like this."""

    name = "contiguous"

    def plan(self, problem: PlanProblem) -> Placement:
        """See Planner; loads are not looked at."""
        return contiguous_placement(
            num_layers=problem.num_layers,
            num_experts=problem.num_experts,
            num_slots=problem.num_slots,
            num_ranks=problem.topology.num_ranks,
        )


class RoundRobinPlanner:
    """Experts dealt out to ranks like cards."""

    name = "round_robin"

    def plan(self, problem: PlanProblem) -> Placement:
        """See Planner; loads are not looked at."""
        ranks = problem.topology.num_ranks
        dealt = (np.arange(problem.num_slots) % problem.num_experts).reshape(-1, ranks).T.ravel()
        return Placement(
            physical_to_logical=np.tile(dealt.astype(np.int64), (problem.num_layers, 1)),
            num_experts=problem.num_experts,
            num_ranks=ranks,
        )


class GreedyPlanner:
    """A second slot for the hottest experts, then longest first into the lightest rank with room."""

    name = "greedy"

    def plan(self, problem: PlanProblem) -> Placement:
        """See Planner."""
        loads = problem.loads
        layers, experts = loads.shape
        order = np.argsort(-loads, axis=1, kind="stable")
        # Slots beyond the experts go to the hottest ones in turn, round after round.
        spare = order[:, np.arange(problem.num_slots - experts) % experts]
        slots = np.concatenate([np.tile(np.arange(experts), (layers, 1)), spare], axis=1)
        counts = np.ones((layers, experts), dtype=np.int64)
        np.add.at(counts, (np.arange(layers)[:, None], spare), 1)
        weights = np.take_along_axis(loads / counts, slots, axis=1)
        ranks = problem.topology.num_ranks
        return Placement(
            physical_to_logical=arrange(slots, *pack(weights, ranks), ranks),
            num_experts=experts,
            num_ranks=ranks,
        )
