"""MegaBlocks: a router beside experts (ParallelMLP) that sort, exchange, compute and restore in one method.

What is a method of its own is wrapped (sorting, the gather-MLP-scatter of local experts, the MLP); the
exchanges are torch's own all-to-alls, the first two asynchronous; the rest is glue with a place: permute
up to the experts, unpermute behind them. Layers that are the older `MoE` and its experts in one work too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from moetrace.adapters.base import LayerMatch, ModelMatch, RouteCounter, Target, layer_numbers, traceable
from moetrace.adapters.groups import expert_parallel
from moetrace.adapters.routes import RouteReader
from moetrace.adapters.targets import count, experts_call, layer_forward, phase
from moetrace_schemas.enums import CountKind, Phase

METHODS = ("indices_and_bins", "permute_and_compute", "parallel_forward_once")


class MegaBlocksAdapter:
    """Layers with a router, and experts that have MegaBlocks' methods."""

    name = "megablocks"
    looks_for = (
        "modules with a child `router`, and a child `experts` (or themselves) with the methods "
        + ", ".join(METHODS)
    )

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        found = []
        for path, module in model.named_modules():
            children = dict(module.named_children())
            owner = children.get("experts", module)
            if "router" in children and all(callable(getattr(owner, method, None)) for method in METHODS):
                found.append((path, module, owner))
        numbers = layer_numbers([path for path, *_ in found])
        layers = (_layer(*each, number) for each, number in zip(found, numbers, strict=True))
        return ModelMatch(layers=tuple(layers))


def _layer(path: str, module: Any, owner: Any, layer: int) -> LayerMatch:
    here = f"{path}." if path else ""
    inside = here if owner is module else f"{here}experts."
    arguments = owner.args
    num_experts = int(owner.num_experts)
    parallel = (
        expert_parallel(arguments.expert_parallel_group) if arguments.moe_expert_model_parallelism else None
    )
    reader = RouteReader(num_experts, int(arguments.moe_top_k))
    # Dropless experts are the ones that also sort for sparse products. On one rank they do without the
    # method that the others call: grouped ones call another, sparse ones none.
    dropless = hasattr(owner, "indices_and_padded_bins")
    method = "permute_and_compute"
    if dropless and parallel is None:
        method = "grouped_permute_and_compute" if arguments.mlp_impl == "grouped" else ""
    compute = f"{inside}{method}"
    targets = [
        layer_forward(module, layer, f"{here}forward"),
        phase(module.router, "forward", layer, f"{here}router.forward", Phase.ROUTER),
        count(module.router, "forward", layer, f"{here}router.forward", reader.router),
        *_sorting(owner, layer, inside),
        *([experts_call(owner, method, layer, compute)] if method else []),
        phase(owner.mlp, "forward", layer, f"{inside}mlp.forward", Phase.EXPERT_GEMM),
    ]
    phases = {Phase.OUTSIDE, Phase.ROUTER, Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE}
    notes = []
    num_local = num_experts
    if parallel is None:
        notes.append("no expert parallelism: no exchange to time")
    else:
        # Ranks beyond the number of experts share one, split along its width.
        num_local = max(num_experts // parallel.size, 1)
        phases |= {Phase.DISPATCH, Phase.COMBINE}
        if num_local * parallel.size == num_experts:
            look = traceable(partial(_count_received, num_local))
            targets.append(count(owner, method, layer, compute, look, CountKind.RECEIVED))
        else:
            notes.append("ranks share experts: rows received are not counted")
    if arguments.moe_capacity_factor > 0 and not dropless:
        notes.append("pairs beyond the capacity are counted as routed: which are dropped is not told")
    shared = getattr(module, "shared_expert", None)
    if shared is not None:
        phases.add(Phase.SHARED_EXPERT)
        targets.append(phase(shared, "forward", layer, f"{here}shared_expert.forward", Phase.SHARED_EXPERT))
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=MegaBlocksAdapter.name,
        num_experts=num_experts,
        num_local_experts=num_local,
        targets=tuple(targets),
        phases=tuple(known for known in Phase if known in phases),
        parallel=parallel,
        notes=tuple(notes),
    )


def _sorting(owner: Any, layer: int, inside: str) -> list[Target]:
    # Which of the two runs, and where, differs between sparse, grouped and padded experts.
    return [
        phase(owner, name, layer, f"{inside}{name}", Phase.PERMUTE, per_step=False)
        for name in ("indices_and_bins", "indices_and_padded_bins")
        if hasattr(owner, name)
    ]


def _count_received(
    num_local: int,
    counter: RouteCounter,
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> None:
    # permute_and_compute(rows, rows per local expert [e], ..)
    for given in (*args, *kwargs.values()):
        if hasattr(given, "dim") and given.dim() == 1 and given.numel() == num_local:
            counter.add_counts(index, given, 0)
            return
