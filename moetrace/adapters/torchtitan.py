"""torchtitan: MoE layers with a token dispatcher, an object and no module, that has dispatch and combine.

The dispatcher is wrapped on the object, so that the router's tensors may be DTensors: ids are counted
at dispatch, where they are local. The all-to-all dispatcher's exchanges are functional collectives that
return at launch; their names are wrapped where its module imported them. Other dispatchers exchange
inside one call.
"""

from __future__ import annotations

import sys
from typing import Any

from moetrace.adapters.base import (
    Call,
    DispatchResult,
    ExpertParallel,
    LayerMatch,
    ModelMatch,
    RouteCounter,
    Target,
    layer_numbers,
    traceable,
)
from moetrace.adapters.groups import expert_parallel
from moetrace.adapters.routes import weight_sums
from moetrace.adapters.targets import count, exchange, experts_call, layer_forward, phase
from moetrace.record.sites import Role
from moetrace_schemas.enums import CountKind, Phase

EXCHANGES = (("all_to_all_single", Call.LAUNCH), ("all_to_all_single_autograd", Call.LAUNCH))


class TorchtitanAdapter:
    """Layers with a router and routed experts that hold inner experts and a token dispatcher."""

    name = "torchtitan"
    looks_for = (
        "modules with a child `router` and a child `routed_experts` that has `inner_experts` and a "
        "`token_dispatcher` with dispatch and combine, as in torchtitan"
    )

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        found = [(path, module) for path, module in model.named_modules() if _is_layer(module)]
        numbers = layer_numbers([path for path, _ in found])
        layers = (_layer(path, module, number) for (path, module), number in zip(found, numbers, strict=True))
        return ModelMatch(layers=tuple(layers))


def _is_layer(module: Any) -> bool:
    children = dict(module.named_children())
    routed = children.get("routed_experts")
    dispatcher = getattr(routed, "token_dispatcher", None)
    return (
        "router" in children
        and "inner_experts" in dict(routed.named_children() if routed is not None else ())
        and all(callable(getattr(dispatcher, name, None)) for name in ("dispatch", "combine"))
    )


def _layer(path: str, module: Any, layer: int) -> LayerMatch:
    here = f"{path}." if path else ""
    routed = module.routed_experts
    experts, dispatcher = routed.inner_experts, routed.token_dispatcher
    experts_name = f"{here}routed_experts.inner_experts.forward"
    mesh = getattr(dispatcher, "ep_mesh", None)
    parallel = expert_parallel(mesh.get_group()) if mesh is not None else None
    targets = [
        layer_forward(module, layer, f"{here}forward"),
        phase(module.router, "forward", layer, f"{here}router.forward", Phase.ROUTER),
        *_dispatcher_targets(dispatcher, layer, f"{here}routed_experts.token_dispatcher", parallel),
        experts_call(experts, "forward", layer, experts_name),
    ]
    phases = {Phase.OUTSIDE, Phase.ROUTER, Phase.EXPERT_GEMM}
    fused: tuple[Phase, ...] = ()
    notes = []
    if parallel is None:
        phases |= {Phase.PERMUTE, Phase.UNPERMUTE}
        notes.append("no expert parallelism: no exchange to time")
    else:
        targets.append(count(experts, "forward", layer, experts_name, _count_received, CountKind.RECEIVED))
        phases |= {Phase.DISPATCH, Phase.COMBINE}
        if _exchanges_apart(dispatcher):
            phases |= {Phase.PERMUTE, Phase.UNPERMUTE}
        else:
            fused = (Phase.PERMUTE, Phase.UNPERMUTE)
            notes.append("rows are permuted inside the exchange: permute and unpermute are part of it")
    shared = getattr(module, "shared_experts", None)
    if shared is not None:
        phases.add(Phase.SHARED_EXPERT)
        targets.append(phase(shared, "forward", layer, f"{here}shared_experts.forward", Phase.SHARED_EXPERT))
    num_experts = int(dispatcher.num_experts)
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=TorchtitanAdapter.name,
        num_experts=num_experts,
        num_local_experts=num_experts // (parallel.size if parallel else 1),
        targets=tuple(targets),
        phases=tuple(known for known in Phase if known in phases),
        fused=fused,
        weight_sums=weight_sums(module.router),
        parallel=parallel,
        notes=tuple(notes),
    )


def _exchanges_apart(dispatcher: Any) -> bool:
    """Whether the dispatcher's exchanges are calls of their own."""
    return hasattr(dispatcher, "_dispatch_token_exchange")


def _dispatcher_targets(
    dispatcher: Any, layer: int, name: str, parallel: ExpertParallel | None
) -> list[Target]:
    to_experts, from_experts = Phase.DISPATCH, Phase.COMBINE
    if parallel is None or _exchanges_apart(dispatcher):
        to_experts, from_experts = Phase.PERMUTE, Phase.UNPERMUTE
    targets = [
        Target(
            owner=dispatcher,
            attribute="dispatch",
            role=Role.PHASE,
            phase=to_experts,
            layer=layer,
            name=f"{name}.dispatch",
            read_dispatch=_read_dispatch if parallel is not None else None,
        ),
        count(dispatcher, "dispatch", layer, f"{name}.dispatch", _count_ids),
        phase(dispatcher, "combine", layer, f"{name}.combine", from_experts),
    ]
    module = sys.modules.get(type(dispatcher).__module__)
    if parallel is not None and _exchanges_apart(dispatcher):
        targets += [
            exchange(module, attribute, f"{type(dispatcher).__module__}.{attribute}", call)
            for attribute, call in EXCHANGES
            if hasattr(module, attribute)
        ]
        typed = getattr(module, "spmd", None)
        if hasattr(typed, "all_to_all"):
            targets.append(exchange(typed, "all_to_all", "spmd_types.all_to_all", Call.LAUNCH))
    return targets


@traceable
def _count_ids(
    counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    # dispatch(rows [T, D], scores [T, K], ids [T, K], rows per expert [E])
    given = (*args, *kwargs.values())
    ids = next(t for t in given if t.dim() == 2 and not t.dtype.is_floating_point)
    counter.add(index, ids)
    for weights in given:
        if weights.dtype.is_floating_point and weights.shape == ids.shape:
            counter.check_weights(index, weights)


@traceable
def _count_received(
    counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    # inner_experts(rows, rows per local expert [e])
    given = (*args, *kwargs.values())
    counter.add_counts(index, next(t for t in given if t.dim() == 1), 0)


def _read_dispatch(result: Any) -> DispatchResult | None:
    rows, _, metadata = result
    sent, received = getattr(metadata, "input_splits", None), getattr(metadata, "output_splits", None)
    if not isinstance(sent, list) or not isinstance(received, list):
        return None
    return DispatchResult(
        received_ids=None,
        received_rows=int(rows.shape[0]),
        row_bytes=int(rows.shape[-1]) * int(rows.element_size()),
        send_sizes=sent,
        receive_sizes=received,
    )
