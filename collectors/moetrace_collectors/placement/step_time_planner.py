"""moetrace's planner: the placement whose predicted step time on the recorded windows is smallest. Pure.

EPLB balances one sum of loads. Steps wait for the fullest rank of every step, though, and for the network:

1. Start from EPLB's placement; its fullest rank per layer becomes the cap that no plan may exceed.
2. Relieve: swap slots to lower the sum over recorded windows of the fullest rank (experts that are hot
   together come apart), first for the sum of loads and then for the windows, without their sampling noise.
3. Gather: where rows cross nodes and co-activation is known, put experts that share tokens on one node, then
   relieve within nodes and regroup across them under the cap.
4. Per layer, keep the candidate with the smallest predicted time, EPLB's own among them.
5. Rename ranks so that most experts stay where they are, and cut back to the migration budget.

With no limit on moves, no layer is predicted to take longer than under EPLB, and none has a fuller rank;
except that a rank may be LOAD_SLACK fuller where experts were gathered and the predicted time is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moetrace_collectors.load.expert_map import Placement
from moetrace_collectors.load.stability import split_windows
from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.placement.eplb import EplbPlanner
from moetrace_collectors.placement.migration import rename_ranks
from moetrace_collectors.placement.move_budget import with_room, within_budget
from moetrace_collectors.placement.node_search import CANDIDATES, Float32Array, gather, regroup
from moetrace_collectors.placement.packing import arrange, pack, replicate
from moetrace_collectors.placement.problem import PlanProblem
from moetrace_collectors.placement.step_cost import Copies
from moetrace_collectors.placement.swap_search import PARTNER_RANKS, relieve

MAX_WINDOWS = 16
"""Windows that are planned for; more are summed to so many, in order."""
FIRST_ROUNDS = 100
"""Swaps per layer for the sum of loads."""
SEARCH_CELLS = 50_000_000
"""Candidates looked at in the search over windows: about a third of a second."""
MAX_ROUNDS = 400
REGROUP_CELLS = 5_000_000
"""Pairs of slots looked at in the search over nodes: about as long again."""
LOAD_SLACK = 0.02
"""How much fuller than under EPLB a rank may be where that spares network copies."""
ROUNDING = 1.0 + 1e-6
"""Searches count in float32; caps are held in float64 afterwards."""


class StepTimePlanner:
    """The planner of this project."""

    name = "moetrace"

    def plan(self, problem: PlanProblem) -> Placement:
        """See Planner."""
        problem = replace(problem, windows=without_noise(split_windows(problem.windows, MAX_WINDOWS)))
        best = self._unlimited(problem)
        today = problem.today
        if today is None:
            return best
        nodes = problem.topology.num_nodes
        if today.num_ranks != best.num_ranks:
            return best
        best = rename_ranks(best, today, num_nodes=nodes)
        if problem.max_moves is None or today.slots_per_rank > best.slots_per_rank:
            return best
        wider = with_room(today, best.num_slots)
        return within_budget(
            problem, wider, best, problem.max_moves, lambda placement: predicted_us(problem, placement)
        )

    def _unlimited(self, problem: PlanProblem) -> Placement:
        eplb = EplbPlanner().plan(problem)
        caps = eplb.rank_loads(problem.loads).max(axis=1)
        parts = problem.topology.num_nodes if problem.is_hierarchical and problem.coactivation is None else 1
        candidates = [eplb]
        even = _relieved(
            problem, eplb.physical_to_logical, caps=None, parts=parts, windows=problem.loads[None]
        )
        candidates.append(_placement(problem, even))
        pairs = _pairs_in_loads(problem)
        cells = SEARCH_CELLS if pairs is None else SEARCH_CELLS // 2
        candidates.append(_placement(problem, _relieved(problem, even, caps=caps, parts=parts, cells=cells)))
        if pairs is not None:
            caps = caps * (1.0 + LOAD_SLACK)
            candidates += [_placement(problem, slots) for slots in _gathered(problem, pairs, caps, even)]
        return _best_by_layer(problem, candidates, caps)


def without_noise(windows: FloatArray) -> FloatArray:
    """[W, L, E] -> the same with what differs between windows by chance taken out, layer by layer.

    ::

        expected   = load of the window x share of the expert over all windows
        dispersion = mean over windows and experts of (load - expected)^2 / expected; 1 by chance alone
        load'      = expected + max(0, 1 - 1 / dispersion) x (load - expected)

    A plan fitted to the windows of a steady load would learn its noise. The sum over windows stays as it is.
    """
    count, _, experts = windows.shape
    if count < 2 or experts < 2:
        return windows
    total = windows.sum(axis=0)
    share = total / np.maximum(total.sum(axis=1, keepdims=True), 1e-300)
    expected = windows.sum(axis=2, keepdims=True) * share
    away = windows - expected
    terms = np.divide(away**2, expected, out=np.zeros_like(away), where=expected > 0.0)
    dispersion = terms.sum(axis=(0, 2)) / ((count - 1) * (experts - 1))
    kept = np.maximum(0.0, 1.0 - 1.0 / np.maximum(dispersion, 1e-300))
    denoised: FloatArray = expected + kept[:, None] * away
    return denoised


def predicted_us(problem: PlanProblem, placement: Placement) -> FloatArray:
    """[L]: predicted time of the recorded windows, without what no placement changes."""
    cost, share = problem.cost, placement.share
    fullest = placement.rank_loads(problem.windows).max(axis=2) / cost.num_groups
    transfer = cost.transfer_us(problem.windows, share, problem.coactivation)
    # Of a sum over windows: the start of each GEMM is the same for every placement.
    work = cost.passes * cost.gemm.us_per_row * fullest
    time: FloatArray = (work + cost.exchanges * transfer).sum(axis=0)
    return time


def _relieved(
    problem: PlanProblem,
    slots: IntArray,
    *,
    caps: FloatArray | None,
    parts: int,
    windows: FloatArray | None = None,
    cells: int = SEARCH_CELLS // 2,
) -> IntArray:
    """For the windows, as many swaps as `cells` allow; or for some other windows given."""
    ranks = problem.topology.num_ranks
    used = problem.windows if windows is None else windows
    per_rank = problem.num_slots // ranks
    a_round = len(used) * problem.num_layers * per_rank * per_rank * min(PARTNER_RANKS, ranks)
    rounds = FIRST_ROUNDS if windows is not None else min(MAX_ROUNDS, max(1, cells // a_round))
    return relieve(
        slots,
        used,
        num_ranks=ranks,
        rounds=rounds,
        out_of_time=problem.out_of_time,
        num_parts=parts,
        caps=None if caps is None else caps / ROUNDING,
    )


def _pairs_in_loads(problem: PlanProblem) -> Float32Array | None:
    """[L, E, E]: shared tokens in the unit of the loads; None where they move nothing."""
    known = problem.coactivation
    top_k = problem.cost.top_k
    moves_nothing = problem.topology.num_nodes == 1 or problem.cost.copies is Copies.PAIR
    if known is None or moves_nothing or top_k is None or top_k < 2:
        return None
    sampled = known.within.sum(axis=(1, 2)) / (top_k - 1)
    scale = (problem.loads.sum(axis=1) / np.maximum(sampled, 1.0)).astype(np.float32)
    pairs: Float32Array = known.within.astype(np.float32) * scale[:, None, None]
    return pairs


def _gathered(
    problem: PlanProblem, pairs: Float32Array, caps: FloatArray, even: IntArray
) -> Sequence[IntArray]:
    """Placements that keep partners on one node: the same for the sum of loads, and for the windows."""
    topology, loads = problem.topology, problem.loads
    nodes = topology.num_nodes
    slots, counts = replicate(loads, problem.num_slots)
    weights = np.take_along_axis(loads / counts, slots, axis=1)
    node_of = gather(slots, weights, pairs, num_nodes=nodes)
    order = np.argsort(node_of, axis=1, kind="stable")
    by_node = np.take_along_axis(slots, order, axis=1).reshape(problem.num_layers * nodes, -1)
    node_weights = np.take_along_axis(weights, order, axis=1).reshape(by_node.shape)
    packed = arrange(by_node, *pack(node_weights, topology.ranks_per_node), topology.ranks_per_node)
    slots = packed.reshape(problem.num_layers, -1)
    slots = _relieved(problem, slots, caps=None, parts=nodes, windows=loads[None])
    slots = _regrouped(problem, slots, pairs, caps)
    slots = _relieved(problem, slots, caps=None, parts=nodes, windows=loads[None])
    above = _placement(problem, slots).rank_loads(loads).max(axis=1) > caps
    if above.any():
        # What cannot be brought under the caps starts again from a placement that is under them.
        slots[above] = _regrouped(problem, even, pairs, caps, layers=np.flatnonzero(above))
    return slots, _relieved(problem, slots, caps=caps, parts=nodes)


def _regrouped(
    problem: PlanProblem,
    slots: IntArray,
    pairs: Float32Array,
    caps: FloatArray,
    *,
    layers: IntArray | None = None,
) -> IntArray:
    """All layers, or some of them."""
    chosen = np.arange(problem.num_layers) if layers is None else layers
    cells = problem.num_layers * CANDIDATES * problem.num_slots
    return regroup(
        slots[chosen],
        problem.loads[chosen],
        pairs[chosen],
        num_ranks=problem.topology.num_ranks,
        num_nodes=problem.topology.num_nodes,
        caps=caps[chosen] / ROUNDING,
        rounds=min(MAX_ROUNDS, max(1, REGROUP_CELLS // cells)),
        out_of_time=problem.out_of_time,
    )


def _best_by_layer(problem: PlanProblem, candidates: Sequence[Placement], caps: FloatArray) -> Placement:
    """Per layer the candidate with the smallest predicted time under the cap; the first one is under it."""
    values = np.stack([predicted_us(problem, candidate) for candidate in candidates])
    fullest = np.stack([candidate.rank_loads(problem.loads).max(axis=1) for candidate in candidates])
    allowed = fullest <= caps * (1.0 + 1e-12)
    chosen = np.where(allowed, values, np.inf).argmin(axis=0)
    slots = np.stack([candidate.physical_to_logical for candidate in candidates])
    return _placement(problem, slots[chosen, np.arange(problem.num_layers)])


def _placement(problem: PlanProblem, slots: IntArray) -> Placement:
    return Placement(
        physical_to_logical=slots, num_experts=problem.num_experts, num_ranks=problem.topology.num_ranks
    )
