"""Local search on a placement: swap two slots wherever that shortens the wait for the fullest rank. Pure.

The objective is the sum over recorded windows of the fullest rank's load, because every layer of every step
waits for its fullest rank, and the rank that is full in one window need not be full in the next. One round
does the best swap of every layer that still has one: a slot of the fullest rank of one window against a slot
of the lightest ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moetrace_collectors.load.expert_map import count_replicas
from moetrace_collectors.model import FloatArray, IntArray

Float32Array = npt.NDArray[np.float32]

LEAST_GAIN = 1e-5
"""Part of the objective that a swap must gain; smaller ones are rounding of float32."""
CELLS_AT_ONCE = 1 << 17
"""Candidates looked at together: more do not stay in a core's cache."""
EVENNESS = np.float32(0.05)
"""What the squares of the ranks' total loads count for in the objective, over the mean load."""
PARTNER_RANKS = 8
"""Ranks, the lightest ones in the window looked at, whose slots may be swapped with the fullest rank's."""


def relieve(
    slots: IntArray,
    windows: FloatArray,
    *,
    num_ranks: int,
    rounds: int,
    out_of_time: Callable[[], bool],
    num_parts: int = 1,
    caps: FloatArray | None = None,
) -> IntArray:
    """Swap slots until no swap helps, the rounds are over, or time is.

    Args:
        slots: [L, S] experts, rank by rank; -1 for an empty one; not changed.
        windows: [W, L, E] loads.
        num_ranks: R.
        rounds: swaps per layer at most.
        out_of_time: asked once a round.
        num_parts: swaps stay within each of so many equal runs of ranks (the nodes of a hierarchical plan).
        caps: [L]: load summed over windows that no rank may come to exceed; None for no limit.

    Returns:
        [L, S]
    """
    slots = slots.copy()
    layers, num_slots = slots.shape
    if num_ranks == num_parts:
        return slots  # a rank has nobody to swap with
    weights = slot_weights(slots, windows)
    per_rank = num_slots // num_ranks
    cells = len(windows) * per_rank * per_rank * min(PARTNER_RANKS, num_ranks)
    at_once = max(1, CELLS_AT_ONCE // max(cells, 1))
    active = np.arange(layers)
    failed = np.zeros(layers, dtype=np.int64)
    for turn in range(rounds):
        if not len(active) or out_of_time():
            break
        for start in range(0, len(active), at_once):
            chosen = active[start : start + at_once]
            limits = None if caps is None else caps[chosen]
            found, first, second = _best_swaps(
                weights[chosen], num_ranks, turn % len(windows), num_parts, limits
            )
            hit, one, other = chosen[found], first[found], second[found]
            slots[hit, one], slots[hit, other] = slots[hit, other], slots[hit, one]
            held = weights[hit, :, one].copy()
            weights[hit, :, one] = weights[hit, :, other]
            weights[hit, :, other] = held
            failed[chosen] = np.where(found, 0, failed[chosen] + 1)
        # A layer is done when no window's fullest rank has a swap that helps.
        active = active[failed[active] < len(windows)]
    return slots


def slot_weights(slots: IntArray, windows: FloatArray) -> Float32Array:
    """[L, S] and [W, L, E] -> [L, W, S]: load of each slot in each window; 0 in empty slots.

    Half the width is twice the speed, and a search needs no more than six digits.
    """
    counts = np.maximum(count_replicas(slots, windows.shape[2]), 1)
    index = np.broadcast_to(np.maximum(slots, 0), (len(windows), *slots.shape))
    weights = np.take_along_axis(windows / counts, index, axis=2) * (slots >= 0)
    return np.ascontiguousarray(weights.transpose(1, 0, 2), dtype=np.float32)


def _best_swaps(
    weights: Float32Array, num_ranks: int, window: int, num_parts: int, caps: FloatArray | None
) -> tuple[npt.NDArray[np.bool_], IntArray, IntArray]:
    """Of [L, W, S]: which layers have a swap that helps, and its two slots; all [L]."""
    layers, num_windows, num_slots = weights.shape
    per_rank = num_slots // num_ranks
    ranks = weights.reshape(layers, num_windows, num_ranks, per_rank).sum(axis=3)
    full = ranks[:, window].argmax(axis=1)
    partners = _partners(ranks[:, window], full, num_parts)
    mine = full[:, None] * per_rank + np.arange(per_rank)
    theirs = (partners[:, :, None] * per_rank + np.arange(per_rank)).reshape(layers, -1)
    # [L, W, s, J]: what the fullest rank gains and the other rank loses if slots i and j change places.
    change = _take(weights, theirs)[:, :, None, :] - _take(weights, mine)[:, :, :, None]
    own_load = _take(ranks, full[:, None])[:, :, :, None]
    other_load = np.repeat(_take(ranks, partners), per_rank, axis=2)[:, :, None, :]
    rest = np.repeat(_take(_max_without(ranks, full), partners), per_rank, axis=2)[:, :, None, :]
    own_after = own_load + change
    other_after = other_load - change
    objective = np.maximum(np.maximum(own_after, other_after), rest).sum(axis=1)
    own_total, other_total = own_after.sum(axis=1), other_after.sum(axis=1)
    # Where several ranks are equally full no single swap lowers the maximum; squares show the way out.
    scale = EVENNESS / np.maximum(ranks.sum(axis=(1, 2)) / num_ranks, 1e-30)[:, None, None]
    own_now = own_load.sum(axis=1)
    other_now = other_load.sum(axis=1)
    squares = own_total**2 - own_now**2 + other_total**2 - other_now**2
    objective += scale * squares
    if caps is not None:
        fits = np.maximum(own_total, other_total) <= caps[:, None, None]
        objective = np.where(fits, objective, np.inf)
    flat = objective.reshape(layers, -1)
    best = flat.argmin(axis=1)
    value = flat[np.arange(layers), best]
    found = value < ranks.max(axis=2).sum(axis=1) * (1.0 - LEAST_GAIN)
    at = np.arange(layers)
    return found, mine[at, best // theirs.shape[1]], theirs[at, best % theirs.shape[1]]


def _partners(loads: Float32Array, full: IntArray, num_parts: int) -> IntArray:
    """[L, R] loads in one window -> [L, P]: the lightest ranks of the fullest rank's part, without itself."""
    num_ranks = loads.shape[1]
    part = num_ranks // num_parts
    start = full // part * part
    of_part = start[:, None] + np.arange(part)
    there = np.take_along_axis(loads, of_part, axis=1)
    # The fullest rank comes last and is cut off.
    order = np.argsort(there, axis=1, kind="stable")[:, : part - 1]
    return np.take_along_axis(of_part, order[:, :PARTNER_RANKS], axis=1)


def _max_without(ranks: Float32Array, full: IntArray) -> Float32Array:
    """[L, W, R]: largest load over all ranks but the fullest one and rank r itself."""
    others = ranks.copy()
    np.put_along_axis(others, np.broadcast_to(full[:, None, None], (*ranks.shape[:2], 1)), -np.inf, axis=2)
    largest = others.argmax(axis=2)[:, :, None]
    top = np.take_along_axis(others, largest, axis=2)
    np.put_along_axis(others, largest, -np.inf, axis=2)
    runner_up = others.max(axis=2, keepdims=True)
    return np.where(np.arange(ranks.shape[2]) == largest, runner_up, top)


def _take(values: Float32Array, index: IntArray) -> Float32Array:
    """[L, W, n] at [L, m] -> [L, W, m]."""
    return np.take_along_axis(values, index[:, None, :], axis=2)
