"""Experts that serve the same tokens onto the same node, without a fuller rank. Pure.

With one copy of a row per node, a token costs as many network copies as nodes hold its experts. Who shares
tokens with whom is the co-activation matrix C; the copies that a node is spared grow with the pairs in it.

`gather` streams over slots, heaviest first, and puts each on the node that holds most of its partners, as far
as loads stay even. `regroup` then swaps slots of different nodes while that lowers the network copies and no
rank exceeds its cap.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moetrace_collectors.load.expert_map import count_replicas
from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.placement.step_cost import Floats, union

Float32Array = npt.NDArray[np.float32]

EVENNESS = 2.0
"""What an even load counts for against partners; 2 leaves nodes within some one per cent of each other."""
CANDIDATES = 8
"""Slots per layer and round that `regroup` tries to move: those with most partners on another node."""
LEAST_GAIN = 1e-5
"""Part of the measure that a swap must gain; smaller ones are rounding of float32."""
OVERLOAD = np.float32(4.0)
"""What a row above a rank's cap counts for against a copy spared."""
CELLS_AT_ONCE = 1 << 15
"""Pairs of slots looked at together."""


def gather(slots: IntArray, weights: FloatArray, pairs: Float32Array, *, num_nodes: int) -> IntArray:
    """[L, S] experts, their loads [L, S] and C [L, E, E] -> node of each slot [L, S], S / N slots each.

    ::

        score of a node = part of the expert's partners that it holds - EVENNESS x (load / fair load)^2
    """
    layers, num_slots = slots.shape
    rows = np.arange(layers)
    counts = count_replicas(slots, pairs.shape[1])
    parts = (1.0 / np.take_along_axis(counts, slots, axis=1)).astype(np.float32)
    fair = np.maximum(weights.sum(axis=1), 1e-30) / num_nodes
    all_partners = np.maximum(pairs.sum(axis=2), 1e-30)
    node_of = np.empty((layers, num_slots), dtype=np.int64)
    held = np.zeros((layers, num_nodes), dtype=np.int64)
    carried = np.zeros((layers, num_nodes))
    partners = np.zeros((layers, num_nodes, pairs.shape[1]), dtype=np.float32)
    for slot in np.argsort(-weights, axis=1, kind="stable").T:
        expert, weight = slots[rows, slot], weights[rows, slot]
        affinity = partners[rows, :, expert] / all_partners[rows, expert][:, None]
        filled = (carried + weight[:, None] / 2.0) / fair[:, None]
        score = np.where(held < num_slots // num_nodes, affinity - EVENNESS * filled**2, -np.inf)
        chosen = score.argmax(axis=1)
        node_of[rows, slot] = chosen
        held[rows, chosen] += 1
        carried[rows, chosen] += weight
        partners[rows, chosen] += pairs[rows, expert] * parts[rows, slot][:, None]
    return node_of


def regroup(
    slots: IntArray,
    loads: FloatArray,
    pairs: Float32Array,
    *,
    num_ranks: int,
    num_nodes: int,
    caps: FloatArray,
    rounds: int,
    out_of_time: Callable[[], bool],
) -> IntArray:
    """Swap slots of different nodes while that lowers network copies, or what ranks carry above their cap.

    The measure is the mean over nodes of the copies they take in, plus the largest (the sum moves where the
    largest alone has no single swap to offer), plus OVERLOAD x the load above caps. No rank comes to exceed
    its cap that did not, and none above it becomes fuller.

    Args:
        slots: [L, S] experts, rank by rank; not changed.
        loads: [L, E].
        pairs: [L, E, E], tokens that two experts share, in the unit of `loads`.
        num_ranks: R.
        num_nodes: N.
        caps: [L]: load that no rank should exceed.
        rounds: swaps per layer at most.
        out_of_time: asked once a round.

    Returns:
        [L, S]
    """
    slots = slots.copy()
    layers, num_slots = slots.shape
    at_once = max(1, CELLS_AT_ONCE // (CANDIDATES * num_slots))
    # Layers do not know of each other, and a few at a time stay in the cache.
    for start in range(0, layers, at_once):
        part = slice(start, start + at_once)
        block, partners = slots[part], pairs[part]
        for _ in range(rounds):
            if out_of_time():
                return slots
            found, first, second = _best_regrouping(
                block, loads[part], partners, num_ranks, num_nodes, caps[part]
            )
            hit, one, other = np.flatnonzero(found), first[found], second[found]
            if not len(hit):
                break
            block[hit, one], block[hit, other] = block[hit, other], block[hit, one]
    return slots


def _best_regrouping(
    slots: IntArray,
    loads: FloatArray,
    pairs: Float32Array,
    num_ranks: int,
    num_nodes: int,
    caps: FloatArray,
) -> tuple[npt.NDArray[np.bool_], IntArray, IntArray]:
    """Which layers have a swap, and its two slots; all [L]."""
    layers, num_slots = slots.shape
    experts = loads.shape[1]
    at = np.arange(layers)
    parts = np.float32(1.0) / np.take_along_axis(count_replicas(slots, experts), slots, axis=1).astype(
        np.float32
    )
    loads = loads.astype(np.float32)
    node = np.arange(num_slots) * num_nodes // num_slots
    rank = np.arange(num_slots) * num_ranks // num_slots
    share = np.zeros((layers, experts, num_nodes), dtype=np.float32)
    np.add.at(share, (at[:, None], slots, node), parts)
    single = np.einsum("le,len->ln", loads, share)
    partners = pairs @ share  # [L, E, N]
    double = np.float32(0.5) * (share * partners).sum(axis=1)
    to_node = np.take_along_axis(partners, slots[:, :, None], axis=1) * parts[:, :, None]  # [L, S, N]
    here = to_node[:, np.arange(num_slots), node]
    away = np.where(np.arange(num_nodes) == node[:, None], -np.inf, to_node).max(axis=2)
    weight = np.take_along_axis(loads, slots, axis=1) * parts
    by_rank = weight.reshape(layers, num_ranks, -1).sum(axis=2)
    over = np.maximum(by_rank - caps[:, None], 0.0).astype(np.float32)
    # Slots of ranks above their cap first, then those that have most to win elsewhere.
    first = (over[:, rank] > 0.0) * (2.0 * np.abs(here).max(axis=1) + 1.0)[:, None]
    tried = np.argsort(-(away - here + first), axis=1, kind="stable")[:, :CANDIDATES]  # [L, c]
    # From here on [L, c, S]: slot i of `tried` against slot j; a is i's node, b is j's.
    gain = np.take_along_axis(weight, tried, axis=1)[:, :, None] - weight[:, None, :]
    a = np.broadcast_to(node[tried][:, :, None], gain.shape)
    b = np.broadcast_to(node, gain.shape)
    i_to = np.take_along_axis(to_node, tried[:, :, None], axis=1)  # [L, c, N]
    i_own = np.take_along_axis(i_to, node[tried][:, :, None], axis=2)
    i_at_b = i_to[:, :, node]
    j_at_a = np.take_along_axis(to_node.transpose(0, 2, 1), node[tried][:, :, None], axis=1)
    between = pairs[
        at[:, None, None], np.take_along_axis(slots, tried, axis=1)[:, :, None], slots[:, None, :]
    ]
    between = between * np.take_along_axis(parts, tried, axis=1)[:, :, None] * parts[:, None, :]
    single_a = np.take_along_axis(single, node[tried], axis=1)[:, :, None] - gain
    single_b = single[:, None, node] + gain
    double_a = np.take_along_axis(double, node[tried], axis=1)[:, :, None] + j_at_a - between - i_own
    double_b = double[:, None, node] + i_at_b - between - here[:, None, :]
    now = union(single, double)
    new_a, new_b = union(single_a, np.maximum(double_a, 0.0)), union(single_b, np.maximum(double_b, 0.0))
    rest = _max_without_two(now, a, b)
    total = now.sum(axis=1)[:, None, None] - np.take_along_axis(now, node[tried], axis=1)[:, :, None]
    total = total - now[:, None, node] + new_a + new_b
    measure = total / num_nodes + np.maximum(np.maximum(new_a, new_b), rest)
    limit = caps[:, None, None].astype(np.float32)
    over_j = np.maximum(by_rank[:, None, rank] + gain - limit, 0.0)
    over_i = np.maximum(np.take_along_axis(by_rank, rank[tried], axis=1)[:, :, None] - gain - limit, 0.0)
    over_now = np.take_along_axis(over, rank[tried], axis=1)[:, :, None] + over[:, None, rank]
    measure += OVERLOAD * (over_i + over_j - over_now)
    fits = over_i + over_j <= over_now
    flat = np.where(fits & (a != b), measure, np.inf).reshape(layers, -1)
    best = flat.argmin(axis=1)
    found = flat[at, best] < (now.mean(axis=1) + now.max(axis=1)) * (1.0 - LEAST_GAIN)
    return found, tried[at, best // num_slots], best % num_slots


def _max_without_two(values: Floats, a: IntArray, b: IntArray) -> Floats:
    """[L, N] and node indices [L, c, S] -> the largest value over the other nodes; 0 where there is none."""
    if values.shape[1] <= 2:
        return np.zeros(a.shape)
    order = np.argsort(-values, axis=1, kind="stable")[:, :3]
    top = np.take_along_axis(values, order, axis=1)
    first, second = order[:, 0, None, None], order[:, 1, None, None]
    first_used = (a == first) | (b == first)
    second_used = (a == second) | (b == second)
    return np.where(
        ~first_used,
        top[:, 0, None, None],
        np.where(~second_used, top[:, 1, None, None], top[:, 2, None, None]),
    )
