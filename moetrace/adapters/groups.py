"""A layer's position in its expert-parallel group, from the process group that the model holds."""

from __future__ import annotations

from typing import Any

from moetrace.adapters.base import ExpertParallel


def expert_parallel(group: Any) -> ExpertParallel | None:
    """Rank, size and lowest global rank of a group; None where there is no group, or one rank only."""
    if group is None or group.size() == 1:
        return None
    from torch.distributed import get_process_group_ranks

    return ExpertParallel(rank=group.rank(), size=group.size(), group=min(get_process_group_ranks(group)))
