"""Which expert sits in which slot of which rank, and what that makes of the experts' load. Pure.

A placement maps physical experts (slots) to logical experts, per layer. Slots are numbered rank by rank::

    rank      |   0   |   1   |   2   |   3   |
    slot      | 0   1 | 2   3 | 4   5 | 6   7 |
    expert    | 5   6 | 5   7 | 0   4 | 3   1 |     expert 5 has two replicas, each with half of its load

A slot may be empty (-1): there is room for a replica, and nothing in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrace_collectors.errors import UsageError
from moetrace_collectors.model import FloatArray, IntArray

EMPTY = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Physical to logical experts of every layer on equally many slots of every rank."""

    physical_to_logical: IntArray
    """[L, S]: logical expert in each slot; -1 where the slot is empty."""
    num_experts: int
    """E, logical experts per layer."""
    num_ranks: int
    """R; rank r has slots r*S/R to (r+1)*S/R - 1."""

    def __post_init__(self) -> None:
        """Refuse a map that no model could run on.

        Raises:
            UsageError: slots do not divide by ranks, an expert is unknown, or one has no slot.
        """
        slots = self.physical_to_logical
        if slots.ndim != 2 or 0 in slots.shape:
            raise UsageError(f"placement of shape {list(slots.shape)}: [layers, slots] expected")
        check_slots(num_slots=slots.shape[1], num_experts=self.num_experts, num_ranks=self.num_ranks)
        unknown = (slots < EMPTY) | (slots >= self.num_experts)
        if unknown.any():
            layer, slot = (int(index) for index in np.argwhere(unknown)[0])
            raise UsageError(
                f"placement layer {layer} slot {slot} holds expert {int(slots[layer, slot])}: "
                f"experts are 0 to {self.num_experts - 1} (-1 for an empty slot)"
            )
        homeless = self.replica_counts == 0
        if homeless.any():
            layer, expert = (int(index) for index in np.argwhere(homeless)[0])
            raise UsageError(
                f"placement layer {layer} has no slot for expert {expert}: every expert needs one at least"
            )

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.physical_to_logical.shape[0])

    @property
    def num_slots(self) -> int:
        """S, over all ranks."""
        return int(self.physical_to_logical.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """S / R."""
        return self.num_slots // self.num_ranks

    @property
    def replica_counts(self) -> IntArray:
        """[L, E]: slots of each expert."""
        return count_replicas(self.physical_to_logical, self.num_experts)

    @property
    def replicas_on_rank(self) -> IntArray:
        """[L, E, R]: slots of each expert on each rank."""
        layers, per_rank, experts = self.num_layers, self.slots_per_rank, self.num_experts
        held = np.zeros((layers, experts + 1, self.num_ranks), dtype=np.int64)
        slots = np.where(self.physical_to_logical == EMPTY, experts, self.physical_to_logical)
        ranks = np.broadcast_to(np.arange(self.num_slots) // per_rank, slots.shape)
        np.add.at(held, (np.arange(layers)[:, None], slots, ranks), 1)
        return held[:, :experts]

    @property
    def share(self) -> FloatArray:
        """[L, E, R]: part of an expert's load that each rank gets; sums to 1 over ranks.

        Replicas share alike, as the field's dispatchers do (round robin or a hash over replicas).
        """
        return self.replicas_on_rank / self.replica_counts[:, :, None]

    def rank_loads(self, loads: FloatArray) -> FloatArray:
        """[..., L, E] -> [..., L, R]: load of every rank."""
        by_rank: FloatArray = np.einsum("...le,ler->...lr", loads, self.share, optimize=True)
        return by_rank

    def slot_loads(self, loads: FloatArray) -> FloatArray:
        """[..., L, E] -> [..., L, S]: load of every slot; 0 in empty ones."""
        slots = np.where(self.physical_to_logical == EMPTY, 0, self.physical_to_logical)
        index = np.broadcast_to(slots, loads.shape[:-1] + slots.shape[-1:])
        per_replica = loads / self.replica_counts
        by_slot: FloatArray = np.take_along_axis(per_replica, index, axis=-1)
        return np.where(self.physical_to_logical == EMPTY, 0.0, by_slot)

    def select_layers(self, layers: IntArray) -> Placement:
        """The placement of some layers, by index."""
        return Placement(
            physical_to_logical=self.physical_to_logical[layers],
            num_experts=self.num_experts,
            num_ranks=self.num_ranks,
        )


def check_slots(*, num_slots: int, num_experts: int, num_ranks: int) -> None:
    """Refuse numbers that no placement can have.

    Raises:
        UsageError: names the field, its value and the fix.
    """
    if num_ranks < 1:
        raise UsageError(f"ranks = {num_ranks}: 1 or more expected")
    if num_slots < num_experts:
        raise UsageError(
            f"slots = {num_slots} are fewer than {num_experts} experts: every expert needs a slot, "
            f"so give at least {-(-num_experts // num_ranks) * num_ranks}"
        )
    if num_slots % num_ranks:
        lower = num_slots - num_slots % num_ranks
        below = f"{lower} or " if lower >= num_experts else ""
        raise UsageError(
            f"slots = {num_slots} do not divide by ranks = {num_ranks}: every rank has equally many, "
            f"so give {below}{lower + num_ranks}"
        )


def count_replicas(physical_to_logical: IntArray, num_experts: int) -> IntArray:
    """[L, S] -> [L, E]: slots of each expert; empty slots count for none."""
    layers = len(physical_to_logical)
    shifted = physical_to_logical + 1 + np.arange(layers)[:, None] * (num_experts + 1)
    flat = np.bincount(shifted.ravel(), minlength=layers * (num_experts + 1))
    counts: IntArray = flat.reshape(layers, num_experts + 1)[:, 1:]
    return counts


def contiguous_placement(*, num_layers: int, num_experts: int, num_slots: int, num_ranks: int) -> Placement:
    """Experts in order over the slots; slots past the experts begin again at expert 0.

    Raises:
        UsageError: see `check_slots`.
    """
    check_slots(num_slots=num_slots, num_experts=num_experts, num_ranks=num_ranks)
    return Placement(
        physical_to_logical=np.tile(np.arange(num_slots, dtype=np.int64) % num_experts, (num_layers, 1)),
        num_experts=num_experts,
        num_ranks=num_ranks,
    )
