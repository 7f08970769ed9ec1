"""The best that a limited number of moved experts can buy. Pure.

Every layer has a ladder of placements, from the one in use (no moves) over the first few swaps to the full
plan. The budget goes step by step to the layer and rung with most gain per moved expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moetrace_collectors.load.expert_map import EMPTY, Placement
from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.placement.migration import copies_needed
from moetrace_collectors.placement.problem import PlanProblem
from moetrace_collectors.placement.swap_search import relieve

FEW = (1, 2, 4)
"""Empty slots that are filled on the first rungs."""
RUNGS = (1, 1, 2, 4, 8, 16, 32)
"""Swaps between the rungs of the ladder."""


def with_room(today: Placement, num_slots: int) -> Placement:
    """The placement in use on more slots per rank; the new ones are empty."""
    layers, ranks = today.num_layers, today.num_ranks
    wider = np.full((layers, ranks, num_slots // ranks), EMPTY, dtype=np.int64)
    wider[:, :, : today.slots_per_rank] = today.physical_to_logical.reshape(layers, ranks, -1)
    return Placement(
        physical_to_logical=wider.reshape(layers, -1), num_experts=today.num_experts, num_ranks=ranks
    )


def within_budget(
    problem: PlanProblem,
    today: Placement,
    full: Placement,
    max_moves: int,
    objective: Callable[[Placement], FloatArray],
) -> Placement:
    """Of every layer's ladder the rung that serves all layers best; at most `max_moves` experts are moved.

    Args:
        problem: the problem.
        today: the placement in use, on as many slots as planned.
        full: the plan without a limit, ranks already named to keep most experts in place.
        max_moves: experts that may be copied to a rank without them.
        objective: [L] of a placement; smaller is better.
    """
    ladder = [today, *_rungs(problem, today), full]
    values = np.stack([objective(rung) for rung in ladder])  # [C, L]
    moves = np.stack([copies_needed(today, rung).sum(axis=1) for rung in ladder])
    chosen = climb(values, moves, max_moves)
    slots = np.stack([rung.physical_to_logical for rung in ladder])
    return Placement(
        physical_to_logical=slots[chosen, np.arange(len(chosen))],
        num_experts=problem.num_experts,
        num_ranks=today.num_ranks,
    )


def climb(values: FloatArray, moves: IntArray, max_moves: int) -> IntArray:
    """[C, L] values and moves per rung -> [L] rung of each layer; rung 0 costs nothing.

    Greedy by gain per extra move, which is within one step of the best for gains that fall as moves rise.
    """
    layers = values.shape[1]
    at = np.arange(layers)
    chosen = np.zeros(layers, dtype=np.int64)
    left = max_moves
    while True:
        gain = values[chosen, at] - values
        extra = moves - moves[chosen, at]
        possible = (gain > 0.0) & (extra <= left)
        if not possible.any():
            return chosen
        # A better rung for no more moves comes first.
        worth = np.where(possible, gain / np.maximum(extra, 1e-9), -np.inf)
        rung, layer = np.unravel_index(int(worth.argmax()), worth.shape)
        left -= int(extra[rung, layer])
        chosen[layer] = rung


def _rungs(problem: PlanProblem, today: Placement) -> Sequence[Placement]:
    slots = today.physical_to_logical
    num_empty = int((slots == EMPTY).sum(axis=1).max())
    rungs = [fill_empty(slots, problem.loads, today.num_ranks, most=few) for few in FEW if few < num_empty]
    slots = fill_empty(slots, problem.loads, today.num_ranks)
    rungs.append(slots)
    for swaps in RUNGS:
        if problem.out_of_time():
            break
        slots = relieve(
            slots,
            problem.windows,
            num_ranks=today.num_ranks,
            rounds=swaps,
            out_of_time=problem.out_of_time,
            num_parts=problem.topology.num_nodes if problem.is_hierarchical else 1,
        )
        rungs.append(slots)
    return [
        Placement(physical_to_logical=rung, num_experts=problem.num_experts, num_ranks=today.num_ranks)
        for rung in rungs
    ]


def fill_empty(slots: IntArray, loads: FloatArray, num_ranks: int, *, most: int | None = None) -> IntArray:
    """[L, S] -> the same with the heaviest replica split into empty slots (all, or `most` per layer).

    The lightest rank with room takes the next one.
    """
    slots = slots.copy()
    layers, num_slots = slots.shape
    per_rank = num_slots // num_ranks
    counts = np.zeros(loads.shape, dtype=np.int64)
    filled = slots != EMPTY
    at = np.nonzero(filled)
    np.add.at(counts, (at[0], slots[at]), 1)
    for layer in range(layers):
        num_empty = int((~filled[layer]).sum())
        for _ in range(num_empty if most is None else min(most, num_empty)):
            heaviest = int((loads[layer] / counts[layer]).argmax())
            counts[layer, heaviest] += 1
            held = np.where(slots[layer] == EMPTY, 0, slots[layer])
            carried = np.where(slots[layer] == EMPTY, 0.0, loads[layer, held] / counts[layer, held])
            by_rank = carried.reshape(num_ranks, per_rank).sum(axis=1)
            has_room = (slots[layer] == EMPTY).reshape(num_ranks, per_rank).any(axis=1)
            rank = int(np.where(has_room, by_rank, np.inf).argmin())
            free = rank * per_rank + int((slots[layer].reshape(num_ranks, per_rank)[rank] == EMPTY).argmax())
            slots[layer, free] = heaviest
    return slots
