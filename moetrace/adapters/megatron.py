"""Megatron-Core: MoE layers whose token dispatcher has one method per phase.

The six methods of a dispatcher (dispatch_preprocess .. combine_postprocess) are the same for the
all-gather, all-to-all and flex dispatchers, and the schedules that overlap batches call them without
the layer's forward; so they are wrapped, on the dispatcher object, and not the layer's own methods.

Shared experts that overlap with the exchange run inside those methods, on a stream of their own: what
shows is the time that the main stream spends on them.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from moetrace.adapters.base import (
    DispatchResult,
    LayerMatch,
    ModelMatch,
    RouteCounter,
    Target,
    layer_numbers,
    traceable,
)
from moetrace.adapters.groups import expert_parallel
from moetrace.adapters.targets import count, exchange, experts_call, layer_forward, phase
from moetrace.record.sites import Role
from moetrace_schemas.enums import CountKind, Phase

METHODS = (
    ("dispatch_preprocess", Phase.PERMUTE),
    ("token_dispatch", Phase.DISPATCH),
    ("dispatch_postprocess", Phase.PERMUTE),
    ("combine_preprocess", Phase.UNPERMUTE),
    ("token_combine", Phase.COMBINE),
    ("combine_postprocess", Phase.UNPERMUTE),
)
WITHOUT_EXCHANGE = {Phase.DISPATCH: Phase.PERMUTE, Phase.COMBINE: Phase.UNPERMUTE}
"""What dispatch and combine are where one rank holds all experts."""
OVERLAPPED = (
    "pre_forward_comm",
    "linear_fc1_forward_and_act",
    "linear_fc2_forward",
    "post_forward_comm",
    "get_output",
)
"""Methods of a shared expert that runs beside the exchange."""
DISPATCHER_MODULE = "megatron.core.transformer.moe.token_dispatcher"
GATHERS = ("gather_from_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region")


class MegatronAdapter:
    """Layers with a router, experts and a token dispatcher."""

    name = "megatron"
    looks_for = (
        "modules with a child `router`, a child `experts` and a `token_dispatcher` that has the methods "
        + ", ".join(method for method, _ in METHODS)
        + ", as in Megatron-Core"
    )

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        found = [
            (path, module)
            for path, module in model.named_modules()
            if {"router", "experts"} <= dict(module.named_children()).keys() and _dispatchers(module)
        ]
        own = [getattr(module, "layer_number", None) for _, module in found]
        # Megatron counts from 1, over all pipeline stages.
        numbers = [number - 1 for number in own if isinstance(number, int)]
        if len(set(numbers)) != len(found):
            numbers = layer_numbers([path for path, _ in found])
        layers = [_layer(path, module, number) for (path, module), number in zip(found, numbers, strict=True)]
        return ModelMatch(layers=tuple(layers))


def _dispatchers(module: Any) -> dict[str, Any]:
    """Dispatchers by attribute: inference swaps between two of them on every forward."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        is_new = not any(value is other for other in found.values())
        if is_new and all(callable(getattr(value, method, None)) for method, _ in METHODS):
            found[name] = value
    return found


def _layer(path: str, module: Any, layer: int) -> LayerMatch:
    here = f"{path}." if path else ""
    dispatchers = _dispatchers(module)
    parallel = expert_parallel(getattr(module, "ep_group", None))
    top_k = int(getattr(module.config, "moe_router_topk", 1))
    targets = [
        layer_forward(module, layer, f"{here}forward"),
        phase(module.router, "forward", layer, f"{here}router.forward", Phase.ROUTER),
        count(
            module.router, "forward", layer, f"{here}router.forward", traceable(partial(_count_map, top_k))
        ),
    ]
    for name, dispatcher in dispatchers.items():
        for method, kind in METHODS:
            if parallel is None:
                kind = WITHOUT_EXCHANGE.get(kind, kind)
            targets.append(
                Target(
                    owner=dispatcher,
                    attribute=method,
                    role=Role.PHASE,
                    phase=kind,
                    layer=layer,
                    name=f"{here}{name}.{method}",
                    read_dispatch=partial(_read_dispatch, dispatcher) if kind is Phase.DISPATCH else None,
                    per_step=len(dispatchers) == 1,
                )
            )
    targets.append(experts_call(module.experts, "forward", layer, f"{here}experts.forward"))
    phases = [Phase.OUTSIDE, Phase.ROUTER, Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE]
    notes: list[str] = []
    if parallel is None:
        notes.append("no expert parallelism: no exchange to time")
    else:
        name = f"{here}experts.forward"
        targets.append(count(module.experts, "forward", layer, name, _count_received, CountKind.RECEIVED))
        targets += _gathers()
        phases += [Phase.DISPATCH, Phase.COMBINE]
    shared = getattr(module, "shared_experts", None)
    if shared is not None:
        phases.append(Phase.SHARED_EXPERT)
        overlapped = bool(getattr(module, "shared_expert_overlap", False))
        for method in OVERLAPPED if overlapped else ("forward",):
            name = f"{here}shared_experts.{method}"
            targets.append(phase(shared, method, layer, name, Phase.SHARED_EXPERT))
        if overlapped:
            notes.append("the shared expert overlaps with the exchange: its time is that of the main stream")
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=MegatronAdapter.name,
        num_experts=int(module.config.num_moe_experts),
        num_local_experts=int(module.num_local_experts),
        targets=tuple(targets),
        phases=tuple(known for known in Phase if known in phases),
        slots=top_k,
        exact_rows=not getattr(module.config, "moe_pad_expert_input_to_capacity", False),
        parallel=parallel,
        notes=tuple(notes),
    )


def _gathers() -> list[Target]:
    """Collectives of dispatchers that are no all-to-all: counts, and the all-gather dispatcher's rows."""
    module = sys.modules.get(DISPATCHER_MODULE)
    return [
        exchange(module, name, f"{DISPATCHER_MODULE}.{name}") for name in GATHERS if hasattr(module, name)
    ]


def _count_map(
    top_k: int,
    counter: RouteCounter,
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> None:
    # (probs [T, E], map [T, E]): the map is the one that is not of floating point.
    chosen = next(item for item in result if not item.dtype.is_floating_point)
    counter.add_mask(index, chosen, int(chosen.shape[0]) * top_k)


@traceable
def _count_received(
    counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    # experts(rows, tokens_per_expert [e], probs)
    counter.add_counts(index, args[1] if len(args) > 1 else kwargs["tokens_per_expert"], 0)


def _read_dispatch(dispatcher: Any, result: Any) -> DispatchResult | None:
    sent, received = getattr(dispatcher, "input_splits", None), getattr(dispatcher, "output_splits", None)
    rows = result[0]
    # Splits that are still on a device would need a sync; other dispatchers have none.
    if sent is None or received is None or getattr(sent, "is_cuda", False):
        return None
    return DispatchResult(
        received_ids=None,
        received_rows=int(rows.shape[0]),
        row_bytes=int(rows.shape[-1]) * int(rows.element_size()),
        send_sizes=[int(size) for size in sent],
        receive_sizes=[int(size) for size in received],
        exchanges_behind=1,  # the weights of the rows
    )
