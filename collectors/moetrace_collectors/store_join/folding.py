"""Counts that collectors could not fold -> logical experts, with the maps that the ledger has now. Pure.

A collector folds what it knows the map of; the rest waits in `unfolded_expert_loads` until its step is
judged::

    expert_loads            --> experts  --------------------+--> experts of the step
    unfolded_expert_loads   --> unfolded --> map? --> fold --+
                                              `-- none: as they came, as where a collector joins

What `expert_loads` has of a layer of a rank step stays, also where a map came after it: rows of other
numbers would not replace it, and its tokens would be there twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moetrace_collectors.ledger.epochs import EpochMap, fold
from moetrace_collectors.model import RankStep


def folded(rank_step: RankStep, maps: Mapping[int, EpochMap | None]) -> RankStep:
    """The rank step with all of its counts under `experts`.

    Args:
        rank_step: of the store.
        maps: by placement version; None where there is none.
    """
    late = late_counts(rank_step, maps)
    experts = rank_step.experts if late is None else (*rank_step.experts, *late.experts)
    return replace(rank_step, experts=experts, unfolded=())


def late_counts(rank_step: RankStep, maps: Mapping[int, EpochMap | None]) -> RankStep | None:
    """The rank step with only those counts that `expert_loads` has not; None where it has all."""
    # Another collector may have known the map, or a process wrote them that came no further.
    told = {(entry.layer, entry.kind) for entry in rank_step.experts}
    untold = tuple(entry for entry in rank_step.unfolded if (entry.layer, entry.kind) not in told)
    if not untold:
        return None
    alone = replace(rank_step, experts=untold, unfolded=())
    epoch = maps.get(rank_step.placement_version)
    return alone if epoch is None else fold(alone, epoch)
