"""fairscale's MOELayer: GShard's layer, whose einsums around the exchanges are no calls of their own.

Its two exchanges are one autograd function, told apart by their place around the experts, and its
experts are a list that is called one by one. What lies between is glue: permute up to the experts,
unpermute behind them. Rows are padded to the capacity.
"""

from __future__ import annotations

import sys
from typing import Any

from moetrace.adapters.base import LayerMatch, ModelMatch, layer_numbers
from moetrace.adapters.capacity import count_admitted
from moetrace.adapters.groups import expert_parallel
from moetrace.adapters.targets import count, exchange, layer_forward, phase
from moetrace_schemas.enums import Phase


class FairscaleAdapter:
    """Layers with a gate, a list of experts and a process group for all of them."""

    name = "fairscale"
    looks_for = "modules with `gate`, a list `experts` and `num_local_experts`, as fairscale's MOELayer"

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        found = [
            (path, module)
            for path, module in model.named_modules()
            if {"gate", "experts"} <= dict(module.named_children()).keys()
            and hasattr(module, "num_local_experts")
            and hasattr(_source(module), "_AllToAll")
        ]
        numbers = layer_numbers([path for path, _ in found])
        layers = (_layer(path, module, number) for (path, module), number in zip(found, numbers, strict=True))
        return ModelMatch(layers=tuple(layers))


def _source(module: Any) -> Any:
    return sys.modules.get(type(module).__module__)


def _layer(path: str, module: Any, layer: int) -> LayerMatch:
    here = f"{path}." if path else ""
    parallel = expert_parallel(module.group)
    num_local = int(module.num_local_experts)
    targets = [
        layer_forward(module, layer, f"{here}forward"),
        phase(module.gate, "forward", layer, f"{here}gate.forward", Phase.ROUTER),
        count(module.gate, "forward", layer, f"{here}gate.forward", count_admitted),
    ]
    targets += [
        phase(expert, "forward", layer, f"{here}experts.{number}.forward", Phase.EXPERT_GEMM)
        for number, expert in enumerate(module.experts)
    ]
    phases = {Phase.OUTSIDE, Phase.ROUTER, Phase.EXPERT_GEMM}
    notes = ["rows are padded to the capacity: rows and bytes sent follow the capacity, not the routing"]
    if parallel is None:
        phases.add(Phase.FUSED)
        notes.append("no expert parallelism: no exchange to time")
    else:
        source = _source(module)
        targets.append(exchange(source._AllToAll, "apply", f"{source.__name__}._AllToAll.apply"))
        phases |= {Phase.PERMUTE, Phase.DISPATCH, Phase.COMBINE, Phase.UNPERMUTE}
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=FairscaleAdapter.name,
        num_experts=num_local * (parallel.size if parallel else 1),
        num_local_experts=num_local,
        targets=tuple(targets),
        phases=tuple(known for known in Phase if known in phases),
        exact_rows=False,
        parallel=parallel,
        notes=tuple(notes),
    )
