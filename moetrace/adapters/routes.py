"""Expert ids in what routers return and experts are called with, found by dtype and shape, never by position.

Shapes: T tokens, K experts per token, E experts.

Families differ: ids [T, K] before or behind their weights, one-hot masks [T, E], rows per expert as a
list, dense scores [T, E] that are zero where an expert was not chosen, or logits only, where the ids
show first in the experts' arguments.
"""

from __future__ import annotations

from typing import Any

from moetrace.adapters.base import RouteCounter, traceable


class RouteReader:
    """Counts one layer's choices, at its router where that shows them, else at its experts."""

    def __init__(self, num_experts: int, top_k: int | None, *, dense_scores: bool = False) -> None:
        """`dense_scores`: without ids, the first float tensor [T, E] is zero where no expert was chosen."""
        self._num_experts = num_experts
        self._top_k = top_k
        self._dense_scores = dense_scores
        self._at_router: bool | None = None
        """Whether the router shows the choices; None before a call that was not traced by torch.compile."""

    @traceable
    def router(
        self, counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Count function of the router's forward."""
        items = [_local(item) for item in (result if isinstance(result, tuple | list) else (result,))]
        found = self._sizes(counter, index, items) or self._tensors(counter, index, items)
        if not found and self._dense_scores:
            found = self._scores(counter, index, items)
        # A change of state inside a compiled region (checkpointing above all) would break its graph.
        if found != self._at_router and not _is_traced(counter):
            self._at_router = found

    @traceable
    def experts(
        self, counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Count function of the experts' forward, for routers that return logits only."""
        if self._at_router or (self._at_router is None and _is_traced(counter)):
            return
        self._tensors(counter, index, (*args, *kwargs.values()))

    def _scores(self, counter: RouteCounter, index: int, items: Any) -> bool:
        for item in items:
            if _is_tensor(item) and item.dtype.is_floating_point and item.shape[-1] == self._num_experts:
                self._mask(counter, index, item)
                return True
        return False

    def _sizes(self, counter: RouteCounter, index: int, items: Any) -> bool:
        for item in items:
            if isinstance(item, list) and len(item) == self._num_experts and isinstance(item[0], int):
                counter.add_counts(index, item, sum(item))
                return True
        return False

    def _tensors(self, counter: RouteCounter, index: int, items: Any) -> bool:
        integers = [item for item in items if _is_tensor(item) and _is_discrete(item)]
        # A vector beside a matrix is an order of rows or a count, not the ids.
        for item in sorted(integers, key=lambda tensor: tensor.dim() < 2):
            width = item.shape[-1]
            if item.dim() >= 2 and width == self._num_experts and width != self._top_k:
                self._mask(counter, index, item)
            else:
                counter.add(index, item)
            return True
        return False

    def _mask(self, counter: RouteCounter, index: int, mask: Any) -> None:
        counter.add_mask(index, mask, mask.numel() // self._num_experts * (self._top_k or 1))


def _is_traced(counter: RouteCounter) -> bool:
    return bool(getattr(counter, "traced", False))


def _local(item: Any) -> Any:
    """What a DTensor holds on this rank."""
    return item.to_local() if hasattr(item, "to_local") else item


def _is_tensor(item: Any) -> bool:
    return hasattr(item, "dtype") and hasattr(item, "dim") and item.dim() >= 1


def _is_discrete(tensor: Any) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def top_k_of(*owners: Any) -> int | None:
    """Experts per token as the first of the owners says it."""
    for owner in owners:
        for name in ("top_k", "num_experts_per_tok", "moe_top_k", "k"):
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def experts_of(*owners: Any) -> int:
    """Number of experts that the owners say, 0 for none."""
    for owner in owners:
        for name in (
            "total_experts",
            "num_experts",
            "n_routed_experts",
            "num_local_experts",
            "moe_num_experts",
        ):
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def is_container(module: Any) -> bool:
    """Whether a module has no forward of its own (ModuleList, ModuleDict), so that its members are called."""
    return getattr(type(module).forward, "__name__", "") == "_forward_unimplemented"
