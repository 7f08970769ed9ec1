"""Tutel's MOELayer: gates return logits, and one forward calls module functions around `expert_local`.

With `a2a_ffn_overlap_degree` above 1 exchange and experts run in turns, and phases interleave. Pairs per
expert are those that the gate chose, before the capacity: the layer keeps them as `dispatch_count`.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from moetrace.adapters.base import LayerMatch, ModelMatch, RouteCounter, layer_numbers
from moetrace.adapters.groups import expert_parallel
from moetrace.adapters.targets import count, exchange, experts_call, function, layer_forward, phase
from moetrace_schemas.enums import Phase

FUNCTIONS = (
    ("extract_critical", Phase.ROUTER),
    ("fast_encode", Phase.PERMUTE),
    ("fast_decode", Phase.UNPERMUTE),
)


class TutelAdapter:
    """Layers with gates, experts and `expert_local`."""

    name = "tutel"
    looks_for = "modules with `gates`, `experts` and the method `expert_local`, as Tutel's MOELayer"

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        found = [
            (path, module)
            for path, module in model.named_modules()
            if {"gates", "experts"} <= dict(module.named_children()).keys()
            and callable(getattr(module, "expert_local", None))
        ]
        numbers = layer_numbers([path for path, _ in found])
        layers = (_layer(path, module, number) for (path, module), number in zip(found, numbers, strict=True))
        return ModelMatch(layers=tuple(layers))


def _layer(path: str, module: Any, layer: int) -> LayerMatch:
    here = f"{path}." if path else ""
    source = sys.modules.get(type(module).__module__)
    parallel = expert_parallel(module.group)
    gates = list(module.gates)
    targets = [
        layer_forward(module, layer, f"{here}forward"),
        count(module, "forward", layer, f"{here}forward", partial(_count_chosen, module)),
        experts_call(module, "expert_local", layer, f"{here}expert_local"),
    ]
    targets += [
        phase(gate, "forward", layer, f"{here}gates.{n}.forward", Phase.ROUTER, per_step=len(gates) == 1)
        for n, gate in enumerate(gates)
    ]
    targets += [function(source, name, kind) for name, kind in FUNCTIONS if hasattr(source, name)]
    phases = {Phase.OUTSIDE, Phase.ROUTER, Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE}
    notes = ["pairs are counted as chosen, before the capacity"]
    communicate = getattr(source, "C", None)
    if parallel is None:
        notes.append("no expert parallelism: no exchange to time")
    else:
        phases |= {Phase.DISPATCH, Phase.COMBINE}
        if hasattr(communicate, "all_to_all"):
            targets.append(exchange(communicate, "all_to_all", "tutel.impls.communicate.all_to_all"))
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=TutelAdapter.name,
        num_experts=int(module.num_global_experts),
        num_local_experts=max(int(module.num_local_experts), 1),
        targets=tuple(targets),
        phases=tuple(known for known in Phase if known in phases),
        parallel=parallel,
        notes=tuple(notes),
    )


def _count_chosen(
    module: Any,
    counter: RouteCounter,
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> None:
    chosen = getattr(module, "dispatch_count", None)
    if chosen is not None:
        counter.add_counts(index, chosen, int(args[0].numel() // args[0].shape[-1]) if args else 0)
