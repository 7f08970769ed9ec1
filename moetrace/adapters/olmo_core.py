"""OLMo-core: a router beside experts (ParallelMLP) with one method per phase.

The method that permutes and launches the exchange returns before the exchange ends; torch's Work object
is waited for between the methods, so the exchange lasts until that wait. In each of the two places where
the MLP runs (alone, or on received rows) rows are gathered before it and scattered behind it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from moetrace.adapters.base import (
    Count,
    DispatchResult,
    LayerMatch,
    ModelMatch,
    RouteCounter,
    Target,
    layer_numbers,
    traceable,
)
from moetrace.adapters.groups import expert_parallel
from moetrace.adapters.routes import RouteReader
from moetrace.adapters.targets import count, experts_call, layer_forward, phase
from moetrace.record.sites import Role
from moetrace_schemas.enums import CountKind, Phase

METHODS = ("permute_and_all_to_all", "compute_local_experts", "reverse_all_to_all", "unpermute")


class OlmoCoreAdapter:
    """Layers with a router and experts that have OLMo-core's four methods."""

    name = "olmo_core"
    looks_for = "modules with a child `router` and a child `experts` that has the methods " + ", ".join(
        METHODS
    )

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        found = [
            (path, module)
            for path, module in model.named_modules()
            if {"router", "experts"} <= dict(module.named_children()).keys()
            and all(callable(getattr(module.experts, method, None)) for method in METHODS)
        ]
        numbers = layer_numbers([path for path, _ in found])
        layers = (_layer(path, module, number) for (path, module), number in zip(found, numbers, strict=True))
        return ModelMatch(layers=tuple(layers))


def _layer(path: str, module: Any, layer: int) -> LayerMatch:
    here = f"{path}." if path else ""
    experts, mlp = module.experts, module.experts.mlp
    num_experts = int(experts.num_experts)
    reader = RouteReader(num_experts, int(experts.top_k))
    parallel = expert_parallel(experts.ep_pg)
    mlp_name = f"{here}experts.mlp.forward"
    targets = [
        layer_forward(module, layer, f"{here}forward"),
        phase(module.router, "forward", layer, f"{here}router.forward", Phase.ROUTER),
        experts_call(experts, "forward", layer, f"{here}experts.forward"),
        phase(mlp, "forward", layer, mlp_name, Phase.EXPERT_GEMM),
    ]
    phases = {Phase.OUTSIDE, Phase.ROUTER, Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE}
    notes = []
    if parallel is None:
        notes.append("no expert parallelism: no exchange to time")
    else:
        phases |= {Phase.DISPATCH, Phase.COMBINE}
        targets += _parallel_targets(experts, layer, f"{here}experts")
        targets.append(count(mlp, "forward", layer, mlp_name, _count_received, CountKind.RECEIVED))
    with_capacity = callable(getattr(experts, "expert_capacity", None))
    if with_capacity:
        name = f"{here}experts.forward"
        for kind, look in ((CountKind.ROUTED, _count_admitted), (CountKind.DROPPED, _count_dropped)):
            counted: Count = traceable(partial(look, experts))
            targets.append(count(experts, "forward", layer, name, counted, kind))
    else:
        targets.append(count(module.router, "forward", layer, f"{here}router.forward", reader.router))
    shared = getattr(module, "shared_mlp", None)
    if shared is not None:
        phases.add(Phase.SHARED_EXPERT)
        targets.append(phase(shared, "forward", layer, f"{here}shared_mlp.forward", Phase.SHARED_EXPERT))
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=OlmoCoreAdapter.name,
        num_experts=num_experts,
        num_local_experts=int(experts.num_local_experts),
        targets=tuple(targets),
        phases=tuple(known for known in Phase if known in phases),
        exact_rows=not with_capacity,
        parallel=parallel,
        notes=tuple(notes),
    )


def _parallel_targets(experts: Any, layer: int, name: str) -> list[Target]:
    launch, compute, back, unpermute = METHODS
    return [
        Target(
            owner=experts,
            attribute=launch,
            role=Role.PHASE,
            phase=Phase.PERMUTE,
            layer=layer,
            name=f"{name}.{launch}",
            read_dispatch=_read_dispatch,
        ),
        experts_call(experts, compute, layer, f"{name}.{compute}"),
        phase(experts, back, layer, f"{name}.{back}", Phase.UNPERMUTE),
        phase(experts, unpermute, layer, f"{name}.{unpermute}", Phase.UNPERMUTE),
    ]


@traceable
def _count_received(
    counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    # Dropless: mlp(rows, rows per local expert [e]). With a capacity there is no second argument.
    for given in (*args[1:], *kwargs.values()):
        if hasattr(given, "dim") and given.dim() == 1:
            counter.add_counts(index, given, 0)
            return


def _count_admitted(
    experts: Any,
    counter: RouteCounter,
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> None:
    chosen, places = _chosen_and_places(experts, args, kwargs)
    counter.add_counts(index, chosen.clamp(max=places), _tokens(args, kwargs) * int(experts.top_k))


def _count_dropped(
    experts: Any,
    counter: RouteCounter,
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> None:
    chosen, places = _chosen_and_places(experts, args, kwargs)
    counter.add_counts(index, (chosen - places).clamp(min=0), 0)


def _chosen_and_places(experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Pairs of this rank per expert [E], and how many of them each expert takes."""
    # experts(rows, weights, ids, pairs per expert)
    chosen = args[3] if len(args) > 3 else kwargs["batch_size_per_expert"]
    return chosen, experts.expert_capacity(_tokens(args, kwargs)) // experts.ep_world_size


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    rows = args[0] if args else kwargs["x"]
    return int(rows.numel() // rows.shape[-1])


def _read_dispatch(result: Any) -> DispatchResult | None:
    # (rows, .., rows from each rank, rows to each rank, capacity, handle)
    received, sent = result[5], result[6]
    if not isinstance(received, list) or not isinstance(sent, list):
        return None
    rows = result[0]
    return DispatchResult(
        received_ids=None,
        received_rows=sum(received),
        row_bytes=int(rows.shape[-1]) * int(rows.element_size()),
        send_sizes=sent,
        receive_sizes=received,
    )
