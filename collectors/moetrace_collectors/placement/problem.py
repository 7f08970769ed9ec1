"""What a planner is given, and the seam that all planners share. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.coactivation import CoActivation
from moetrace_collectors.load.expert_map import Placement, check_slots
from moetrace_collectors.model import FloatArray
from moetrace_collectors.placement.step_cost import StepCost
from moetrace_collectors.placement.topology import Topology


def never() -> bool:
    """No bound on the time."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanProblem:
    """One planning problem: L layers, E experts, W windows of recorded loads."""

    windows: FloatArray
    """[W, L, E]: recorded loads; planners that look at one sum use that over W."""
    num_slots: int
    topology: Topology
    cost: StepCost
    num_groups: int = 1
    """Expert groups of a group-limited router; 1 where it has none."""
    today: Placement | None = None
    """The placement in use; None where it is not known."""
    coactivation: CoActivation | None = None
    max_moves: int | None = None
    """Experts that may be copied to another rank, over all layers; None: as many as it takes."""
    out_of_time: Callable[[], bool] = never
    """Asked between rounds of a search; what was found so far is returned once it says so."""

    def __post_init__(self) -> None:
        """Refuse what no planner can plan.

        Raises:
            UsageError: names the field, its value and the fix.
        """
        check_slots(num_slots=self.num_slots, num_experts=self.num_experts, num_ranks=self.topology.num_ranks)
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise UsageError(
                f"groups = {self.num_groups} do not divide {self.num_experts} experts: give the router's "
                "number of expert groups"
            )

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.windows.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.windows.shape[2])

    @property
    def loads(self) -> FloatArray:
        """[L, E]: summed over windows."""
        summed: FloatArray = self.windows.sum(axis=0)
        return summed

    @property
    def is_hierarchical(self) -> bool:
        """Whether groups of experts are kept together on nodes, as EPLB does where they divide."""
        return self.num_groups % self.topology.num_nodes == 0 and (
            self.num_groups > 1 and self.topology.num_nodes > 1
        )


class Planner(Protocol):
    """One way to place experts."""

    @property
    def name(self) -> str:
        """Name in tables and documents."""

    def plan(self, problem: PlanProblem) -> Placement:
        """A placement of the problem's experts on its slots."""
