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
        found = self._sizes(counter, index, items) or self._tensors(counter, index, items) is not None
        if not found and self._dense_scores:
            found = self._scores(counter, index, items)
        # A change of state inside a compiled region (checkpointing above all) would break its graph.
        if found != self._at_router and not _is_traced(counter):
            self._at_router = found

    @traceable
    def experts(
        self, counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Count function of the experts' forward: their pairs, or the choices where the router shows none."""
        given = (*args, *kwargs.values())
        if self._at_router is None and not _is_traced(counter) and counter.counted(index):
            # The router was called in a graph, and counted there.
            self._at_router = True
        if self._at_router or (self._at_router is None and _is_traced(counter)):
            looks = not _is_traced(counter) and counter.checking
            if looks and (ids := _ids(given, self._num_experts, self._top_k)) is not None:
                counter.add_executed(index, ids)
            return
        # From here on the router shows nothing, or what is counted here would be taken for its choices.
        if self._at_router is None and not _is_traced(counter):
            self._at_router = False
        self._tensors(counter, index, given)

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

    def _tensors(self, counter: RouteCounter, index: int, items: Any) -> Any | None:
        ids = _ids(items, self._num_experts, self._top_k)
        if ids is not None:
            counter.add(index, ids)
            if counter.checking and (weights := _weights(items, ids, self._num_experts)) is not None:
                counter.check_weights(index, weights)
            return ids
        integers = (item for item in items if _is_tensor(item) and _is_discrete(item))
        mask = next((item for item in integers if item.dim() >= 2), None)
        if mask is not None:
            self._mask(counter, index, mask)
        return mask

    def _mask(self, counter: RouteCounter, index: int, mask: Any) -> None:
        counter.add_mask(index, mask, mask.numel() // self._num_experts * (self._top_k or 1))


def _ids(items: Any, num_experts: int, top_k: int | None) -> Any | None:
    """The tensor of ids [.., K] among the items; None where there is none, or only a mask [.., E]."""
    integers = [item for item in items if _is_tensor(item) and _is_discrete(item)]
    if not integers:
        return None
    # A vector beside a matrix is an order of rows or a count, not the ids.
    first = ([tensor for tensor in integers if tensor.dim() >= 2] or integers)[0]
    width = first.shape[-1]
    is_mask = first.dim() >= 2 and width == num_experts and width != top_k
    return None if is_mask else first


def _weights(items: Any, ids: Any, num_experts: int) -> Any | None:
    """The weights of the ids: the last float tensor of their shape, where logits [.., E] have another."""
    if ids.dim() < 2 or ids.shape[-1] == num_experts:
        return None
    found = None
    for item in items:
        if _is_tensor(item) and item.dtype.is_floating_point and item.shape == ids.shape:
            found = item
    return found


def weight_sums(*owners: Any) -> tuple[float, ...]:
    """What the routing weights of a token may add up to, as the first owner that speaks of it says.

    Normalised weights add up to 1; a scaling factor may be applied to them in the router, or behind the
    experts. Weights that are not normalised may add up to anything.
    """
    normalised = next(
        (
            value
            for owner in owners
            for name in ("norm_topk_prob", "route_norm", "renormalize")
            if isinstance(value := getattr(owner, name, None), bool)
        ),
        False,
    )
    if not normalised:
        return ()
    factors = {
        float(value)
        for owner in owners
        for name in ("routed_scaling_factor", "route_scale")
        if isinstance(value := getattr(owner, name, None), int | float) and not isinstance(value, bool)
    }
    return tuple(sorted({1.0, *factors}))


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
