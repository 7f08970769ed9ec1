"""Whether replicas fit: expert weights against KV cache and activations, per rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from moetrace_collectors.errors import UsageError

EXPERT_BYTES = 44.04e6
"""Assumed where not told: 3 x 7168 x 2048 one-byte weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of the smallest rank, and what an expert takes of it. Sizes in 1e9 bytes."""

    memory_gb: float | None
    """Of the rank with the least; None where it is not told, and then everything fits."""
    reserved_gb: float
    """KV cache, activations, and everything else that is no routed expert."""
    expert_bytes: float
    num_layers: int

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: nothing is left for experts.
        """
        if self.memory_gb is not None and self.memory_gb <= self.reserved_gb:
            raise UsageError(
                f"memory-gb = {self.memory_gb:g} is not above reserved-gb = {self.reserved_gb:g}: "
                "nothing is left for experts"
            )

    def experts_gb(self, slots_per_rank: int) -> float:
        """Weights of so many slots in every layer."""
        return slots_per_rank * self.num_layers * self.expert_bytes / 1e9

    @property
    def most_slots_per_rank(self) -> int | None:
        """Slots that fit beside what is reserved; None where memory is not told."""
        if self.memory_gb is None:
            return None
        return int((self.memory_gb - self.reserved_gb) * 1e9 / (self.num_layers * self.expert_bytes))

    def fits(self, slots_per_rank: int) -> bool:
        """Whether so many slots fit."""
        most = self.most_slots_per_rank
        return most is None or slots_per_rank <= most

    def check(self, *, num_slots: int, num_ranks: int, num_experts: int) -> None:
        """Refuse slots that do not fit.

        Raises:
            UsageError: names what is needed, what there is, and the fix.
        """
        per_rank = num_slots // num_ranks
        most = self.most_slots_per_rank
        if most is None or per_rank <= most:
            return
        assert self.memory_gb is not None  # else everything fits
        needed = self.experts_gb(per_rank)
        fix = (
            f"give --slots {most * num_ranks} or fewer"
            if most * num_ranks >= num_experts
            else f"{num_experts} experts do not fit on {num_ranks} ranks at all, so give more ranks or memory"
        )
        raise UsageError(
            f"slots = {num_slots} need {needed:.1f} GB per rank ({per_rank} slots x {self.num_layers} layers "
            f"x {self.expert_bytes / 1e6:.1f} MB), memory-gb = {self.memory_gb:g} less reserved-gb = "
            f"{self.reserved_gb:g} leaves {self.memory_gb - self.reserved_gb:.1f} GB: {fix}"
        )
