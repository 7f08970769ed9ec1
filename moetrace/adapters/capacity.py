"""Routers with a capacity: pairs beyond it are dropped. Counts what was admitted, and what was not.

Shapes: T tokens, K experts per token, E experts, C capacity.

GShard's gate returns (auxiliary loss, combine weights [T, E, C], mask [T, E, C], ..); DeepSpeed's newer
one returns ids [K, T] with -1 for dropped pairs; both may end with the pairs per expert before drops.
"""

from __future__ import annotations

from typing import Any

from moetrace.adapters.base import RouteCounter, traceable


@traceable
def count_admitted(
    counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    """Pairs that got a place, as `routed`."""
    admitted, pairs = _admitted(result)
    if admitted is not None:
        counter.add_counts(index, admitted, pairs)


@traceable
def count_dropped(
    counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    """Pairs that found their expert full, as `dropped`, where the gate says how many it chose."""
    admitted, _ = _admitted(result)
    chosen = _chosen(result)
    if admitted is not None and chosen is not None:
        # A recomputed forward notes its pairs once, under `routed`.
        counter.add_counts(index, chosen.to(admitted.device) - admitted, 0)


def _admitted(result: Any) -> tuple[Any, int]:
    """Admitted pairs per expert [E], and pairs in all."""
    numbers = [item for item in result if isinstance(item, int)]
    experts = numbers[0] if numbers else None
    for item in result:
        if not hasattr(item, "dim"):
            continue
        if item.dim() == 3:
            # Combine weights or mask, whichever comes first: both are zero where there is no place.
            return (item != 0).sum(dim=(0, 2)), int(item.shape[0])
        if item.dim() == 2 and experts is not None and not item.dtype.is_floating_point:
            bins = item.new_zeros(experts + 1).long()
            at = item.reshape(-1).long().add(1)
            return bins.scatter_add_(0, at, at.new_ones(()).expand(at.shape))[1:], int(item.numel())
    return None, 0


def _chosen(result: Any) -> Any | None:
    last = result[-1]
    return last if hasattr(last, "dim") and last.dim() == 1 and not last.dtype.is_floating_point else None
