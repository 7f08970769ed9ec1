"""Which rank holds each expert, as far as a placement says it: rows are held against it.

Without a placement experts lie in order, as many on each rank. A placement moves them; where it holds one
expert in several slots, which of them a row goes to is the dispatcher's choice, and nothing can be said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moetrace_schemas.enums import CountIds
from moetrace_schemas.placement import EMPTY, PlacementMap, PlacementTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertHomes:
    """Ranks of the expert-parallel group by layer and logical expert."""

    num_ranks: int = 0
    by_layer: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def rows_by_rank(self, layer: int, counts: Sequence[int], num_ranks: int) -> tuple[int, ...] | None:
        """What each rank should get of these pairs per expert; None where that is not known."""
        homes = self.by_layer.get(layer)
        if homes is None or len(homes) != len(counts) or self.num_ranks != num_ranks:
            return None
        rows = [0] * num_ranks
        for home, count in zip(homes, counts, strict=True):
            rows[home] += count
        return tuple(rows)


UNKNOWN = ExpertHomes()
"""Of a placement whose map nobody gave here."""


def homes_of(placement: PlacementMap, terms: PlacementTerms) -> ExpertHomes:
    """What a map says; without layers that hold an expert twice, and unknown where counts are of slots."""
    if terms.count_ids is CountIds.PHYSICAL:
        return UNKNOWN
    slots_per_rank = placement.num_slots // placement.num_ranks
    by_layer = {}
    for layer, row in zip(placement.layers, placement.physical_to_logical, strict=True):
        filled = {expert: slot // slots_per_rank for slot, expert in enumerate(row) if expert != EMPTY}
        if len(filled) == sum(expert != EMPTY for expert in row):
            by_layer[layer] = tuple(filled[expert] for expert in range(placement.num_experts))
    return ExpertHomes(num_ranks=placement.num_ranks, by_layer=by_layer)
