"""Layouts of transformers 4, some of which live on in 5: experts called one by one, and sorted linear pairs.

1. `experts` is a ModuleList or ModuleDict beside a router `gate` or `router`. The block's own forward
   gathers the rows of each expert, calls it and adds up: permute, GEMM and unpermute interleave and
   are `fused`.
   The router is often a plain Linear, and softmax and top-k are statements of the block; so experts
   are counted by the rows that each one is called with.
2. `input_linear` and `output_linear`, called with rows sorted by expert and the rows per expert, beside
   a `router` that returns those.
"""

from __future__ import annotations

from typing import Any

from moetrace.adapters.base import Count, LayerMatch, ModelMatch, RouteCounter, layer_numbers, traceable
from moetrace.adapters.routes import RouteReader, is_container, top_k_of
from moetrace.adapters.targets import count, layer_forward, phase
from moetrace_schemas.enums import Phase

ROUTER_NAMES = ("gate", "router")
SHARED_NAMES = ("shared_experts", "shared_expert", "shared_mlp")
LINEAR_NAMES = ("input_linear", "output_linear")


class TransformersV4Adapter:
    """Blocks with a ModuleList of experts, and blocks with linears over sorted rows."""

    name = "transformers_v4"
    looks_for = (
        "modules with a child `gate` or `router` beside a ModuleList `experts`, or beside `input_linear` and "
        "`output_linear` over rows sorted by expert, as in transformers 4"
    )

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        blocks, skipped = [], []
        for path, block in model.named_modules():
            children = dict(block.named_children())
            router_name = next((name for name in ROUTER_NAMES if name in children), None)
            if router_name is None:
                continue
            experts = children.get("experts")
            if experts is not None and is_container(experts) and len(experts):
                blocks.append((path, block, children, router_name))
            elif all(hasattr(children.get(name), "num_experts") for name in LINEAR_NAMES):
                if hasattr(block, "map") and hasattr(block, "reduce"):
                    skipped.append((path, "mixture of attention: attention runs between its two halves"))
                else:
                    blocks.append((path, block, children, router_name))
        numbers = layer_numbers([path for path, *_ in blocks])
        layers = tuple(_layer(*block, number) for block, number in zip(blocks, numbers, strict=True))
        return ModelMatch(layers=layers, skipped=tuple(skipped))


def _layer(path: str, block: Any, children: dict[str, Any], router_name: str, layer: int) -> LayerMatch:
    here = f"{path}." if path else ""
    router = children[router_name]
    targets = [
        layer_forward(block, layer, f"{here}forward", own_time=Phase.FUSED),
        phase(router, "forward", layer, f"{here}{router_name}.forward", Phase.ROUTER),
    ]
    phases = [Phase.OUTSIDE, Phase.ROUTER]
    for name in SHARED_NAMES:
        if name in children:
            targets.append(
                phase(children[name], "forward", layer, f"{here}{name}.forward", Phase.SHARED_EXPERT)
            )
            phases.append(Phase.SHARED_EXPERT)
    fused: tuple[Phase, ...] = ()
    if "experts" in children:
        num_experts = len(children["experts"])
        for number, expert in enumerate(children["experts"].children()):
            targets.append(
                count(expert, "forward", layer, f"{here}experts.{number}.forward", _rows_of_expert(number))
            )
        fused = (Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE)
        phases.append(Phase.FUSED)
        note = (
            "experts run one by one: permute, GEMM and unpermute cannot be told apart; rows count padding too"
        )
    else:
        num_experts = int(children["input_linear"].num_experts)
        reader = RouteReader(num_experts, top_k_of(router, block))
        targets.append(count(router, "forward", layer, f"{here}{router_name}.forward", reader.router))
        for name in LINEAR_NAMES:
            targets.append(
                phase(children[name], "forward", layer, f"{here}{name}.forward", Phase.EXPERT_GEMM)
            )
        phases += [Phase.EXPERT_GEMM, Phase.FUSED]
        fused = (Phase.PERMUTE, Phase.UNPERMUTE)
        note = "rows are sorted and added up between the linears: permute and unpermute are fused"
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=TransformersV4Adapter.name,
        num_experts=num_experts,
        num_local_experts=num_experts,
        targets=tuple(targets),
        phases=tuple(phases),
        fused=fused,
        notes=("no expert parallelism: no exchange to time", note),
    )


def _rows_of_expert(number: int) -> Count:
    def look(
        counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        rows = args[0] if args else next(iter(kwargs.values()))
        counter.add_rows(index, number, rows.numel() // rows.shape[-1])

    marked: Count = traceable(look)
    return marked
