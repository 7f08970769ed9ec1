"""Replicas and packings, for all layers at once. Pure.

Every loop runs over slots or experts and never over layers, so 61 layers cost about as much as one.
"""

from __future__ import annotations

import numpy as np

from moetrace_collectors.model import FloatArray, IntArray


def replicate(loads: FloatArray, num_slots: int) -> tuple[IntArray, IntArray]:
    """[L, E] -> experts of the slots [L, S] and replicas of the experts [L, E].

    Each further slot goes to the expert whose replicas carry most now (the lower id among equals), which
    keeps the largest replica as small as can be.
    """
    layers, experts = loads.shape
    counts = np.ones((layers, experts), dtype=np.int64)
    slots = np.empty((layers, num_slots), dtype=np.int64)
    slots[:, :experts] = np.arange(experts)
    rows = np.arange(layers)
    for slot in range(experts, num_slots):
        heaviest = (loads / counts).argmax(axis=1)
        slots[:, slot] = heaviest
        counts[rows, heaviest] += 1
    return slots, counts


def pack(weights: FloatArray, num_packs: int) -> tuple[IntArray, IntArray]:
    """[L, n] -> pack of each item [L, n] and its place there [L, n]; packs hold n / num_packs items each.

    Longest first, each into the lightest pack with room (the lower one among equals).
    """
    layers, items = weights.shape
    room = items // num_packs
    if room == 1:
        # One item each is even as it is; items stay where they are.
        everywhere = np.broadcast_to(np.arange(items, dtype=np.int64), weights.shape)
        return everywhere, np.zeros(weights.shape, dtype=np.int64)
    order = np.argsort(-weights, axis=1, kind="stable")
    pack_of = np.empty((layers, items), dtype=np.int64)
    place_of = np.empty((layers, items), dtype=np.int64)
    # A full pack weighs infinity, so that argmin alone finds the lightest one with room.
    carried = np.zeros((layers, num_packs))
    filled = np.zeros((layers, num_packs), dtype=np.int64)
    rows = np.arange(layers)
    for item in order.T:
        chosen = carried.argmin(axis=1)
        pack_of[rows, item] = chosen
        place_of[rows, item] = filled[rows, chosen]
        filled[rows, chosen] += 1
        carried[rows, chosen] += weights[rows, item]
        carried[rows, chosen] = np.where(filled[rows, chosen] == room, np.inf, carried[rows, chosen])
    return pack_of, place_of


def arrange(slots: IntArray, pack_of: IntArray, place_of: IntArray, num_packs: int) -> IntArray:
    """[L, n] items in any order -> [L, n] pack by pack."""
    arranged = np.empty_like(slots)
    np.put_along_axis(arranged, pack_of * (slots.shape[1] // num_packs) + place_of, slots, axis=1)
    return arranged
