"""All planners by name, in the order in which they are shown."""

from __future__ import annotations

from moetrace_collectors.placement.eplb import EplbPlanner
from moetrace_collectors.placement.problem import Planner
from moetrace_collectors.placement.simple_planners import ContiguousPlanner, GreedyPlanner, RoundRobinPlanner
from moetrace_collectors.placement.step_time_planner import StepTimePlanner

PLANNERS: tuple[Planner, ...] = (
    ContiguousPlanner(),
    RoundRobinPlanner(),
    GreedyPlanner(),
    EplbPlanner(),
    StepTimePlanner(),
)
