"""Counts that collectors could not fold -> logical experts, with the maps that the ledger has now. Pure.

A collector folds what it knows the map of; the rest waits in `unfolded_expert_loads` until its step is
judged::

    expert_loads            --> experts  --------------------+--> experts of the step
    unfolded_expert_loads   --> unfolded --> map? --> fold --+
                                              `-- none: as they came, as where a collector joins
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
    if not rank_step.unfolded:
        return rank_step
    # Written before, by a process that came no further: the same counts, and not more of them.
    again = {(entry.layer, entry.kind) for entry in rank_step.unfolded}
    kept = [entry for entry in rank_step.experts if (entry.layer, entry.kind) not in again]
    return replace(rank_step, experts=(*kept, *_told(rank_step, maps).experts), unfolded=())


def late_counts(rank_step: RankStep, maps: Mapping[int, EpochMap | None]) -> RankStep | None:
    """The rank step with only those counts that `expert_loads` has not; None where it has all."""
    return _told(rank_step, maps) if rank_step.unfolded else None


def _told(rank_step: RankStep, maps: Mapping[int, EpochMap | None]) -> RankStep:
    alone = replace(rank_step, experts=rank_step.unfolded, unfolded=())
    epoch = maps.get(rank_step.placement_version)
    return alone if epoch is None else fold(alone, epoch)
