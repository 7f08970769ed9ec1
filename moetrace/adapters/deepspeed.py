"""DeepSpeed: MOELayer (gate, capacity-padded all-to-all, experts) and AutoEP's replacement of other blocks.

MOELayer sends rows padded to the capacity, so that bytes follow the capacity and not the routing. Its
two exchanges are one autograd function, told apart by their place around the experts. Routed pairs are
those that the gate admits; pairs beyond the capacity are counted as `dropped`.

Instrument after `deepspeed.initialize`: AutoEP replaces the modules that were there before.
"""

from __future__ import annotations

import sys
from typing import Any

from moetrace.adapters.base import DispatchResult, LayerMatch, ModelMatch, Target, layer_numbers
from moetrace.adapters.capacity import count_admitted, count_dropped
from moetrace.adapters.groups import expert_parallel
from moetrace.adapters.routes import RouteReader
from moetrace.adapters.targets import count, exchange, function, layer_forward, phase
from moetrace.record.sites import Role
from moetrace_schemas.enums import CountKind, Phase

SHARDED_FUNCTIONS = (
    ("_route_slots", Phase.PERMUTE),
    ("_sparse_encode", Phase.PERMUTE),
    ("_sparse_decode", Phase.UNPERMUTE),
)
"""Around the exchanges of MOELayer; releases without them use einsums, which show as glue."""
AUTO_FUNCTIONS = (
    ("compute_split_plan", Phase.PERMUTE),
    ("permute_by_local_expert", Phase.PERMUTE),
    ("unpermute_by_local_expert", Phase.UNPERMUTE),
    ("combine_from_routed", Phase.UNPERMUTE),
)
"""Around the exchanges of AutoEP's layer."""
EXCHANGES = ("_AllToAll", "_AllToAllV")


class DeepSpeedAdapter:
    """MOELayer and AutoEP layers."""

    name = "deepspeed"
    looks_for = (
        "modules with `gate`, `experts`, `ep_size` and `num_local_experts`, as in deepspeed.moe, or with "
        "`router`, `experts` and AutoEP's functions"
    )

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        found, skipped = [], []
        for path, module in model.named_modules():
            if not _is_layer(module):
                continue
            if module.ep_size > 1 and module.ep_group is None:
                skipped.append(
                    (path, "its process group is not set yet: instrument after deepspeed.initialize")
                )
            else:
                found.append((path, module))
        numbers = layer_numbers([path for path, _ in found])
        layers = (_layer(path, module, number) for (path, module), number in zip(found, numbers, strict=True))
        return ModelMatch(layers=tuple(layers), skipped=tuple(skipped))


def _is_layer(module: Any) -> bool:
    has = dict(module.named_children()).keys()
    sizes = all(hasattr(module, name) for name in ("ep_size", "ep_group", "num_local_experts"))
    return sizes and "experts" in has and ("gate" in has or ("router" in has and _is_auto(module)))


def _is_auto(module: Any) -> bool:
    return hasattr(_source(module), AUTO_FUNCTIONS[1][0])


def _source(module: Any) -> Any:
    """The Python module whose functions a layer calls."""
    return sys.modules.get(type(module).__module__)


def _layer(path: str, module: Any, layer: int) -> LayerMatch:
    here = f"{path}." if path else ""
    auto = _is_auto(module)
    router = module.router if auto else module.gate
    router_name = f"{here}{'router' if auto else 'gate'}.forward"
    num_experts = int(module.ep_size) * int(module.num_local_experts)
    targets = [
        layer_forward(module, layer, f"{here}forward"),
        phase(router, "forward", layer, router_name, Phase.ROUTER),
    ]
    if auto:
        reader = RouteReader(num_experts, None)
        targets.append(count(router, "forward", layer, router_name, reader.router))
    else:
        targets += [
            count(router, "forward", layer, router_name, count_admitted),
            count(router, "forward", layer, router_name, count_dropped, CountKind.DROPPED),
        ]
    parallel = expert_parallel(module.ep_group) if module.ep_size > 1 else None
    targets.append(
        Target(
            owner=module.experts,
            attribute="forward",
            role=Role.EXPERTS,
            phase=Phase.EXPERT_GEMM,
            layer=layer,
            name=f"{here}experts.forward",
            read_dispatch=_read_padded if parallel is not None and not auto else None,
        )
    )
    phases = {Phase.OUTSIDE, Phase.ROUTER, Phase.EXPERT_GEMM}
    notes = []
    if getattr(module, "use_tutel", False):
        notes.append("rows are encoded by Tutel: its calls show as glue around the exchange")
    else:
        functions = AUTO_FUNCTIONS if auto else SHARDED_FUNCTIONS
        source = _source(module)
        for name, kind in functions:
            if hasattr(source, name):
                targets.append(function(source, name, kind, per_step=not auto))
                phases.add(kind)
    if parallel is None:
        notes.append("no expert parallelism: no exchange to time")
    else:
        for name in EXCHANGES:
            owner = getattr(_source(module), name, None)
            if owner is not None:
                targets.append(exchange(owner, "apply", f"{type(module).__module__}.{name}.apply"))
        phases |= {Phase.PERMUTE, Phase.DISPATCH, Phase.COMBINE, Phase.UNPERMUTE}
    if not auto:
        notes.append(
            "rows are padded to the capacity: rows and bytes sent follow the capacity, not the routing"
        )
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=DeepSpeedAdapter.name,
        num_experts=num_experts,
        num_local_experts=int(module.num_local_experts),
        targets=tuple(targets),
        phases=tuple(known for known in Phase if known in phases),
        exact_rows=auto,
        parallel=parallel,
        notes=tuple(notes),
    )


def _read_padded(result: Any) -> DispatchResult:
    # [ranks, local experts, capacity, hidden]: the same number of rows to and from every rank.
    ranks, local, capacity = (int(size) for size in result.shape[:3])
    sizes = [local * capacity] * ranks
    return DispatchResult(
        received_ids=None,
        received_rows=sum(sizes),
        row_bytes=int(result.shape[-1]) * int(result.element_size()),
        send_sizes=sizes,
        receive_sizes=sizes,
    )
