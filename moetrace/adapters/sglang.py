"""SGLang: fused MoE layers with a dispatcher of their own, beside a `gate` and a `topk` in the block.

Dispatchers that split each exchange in two (issue, then receive) are wrapped in both halves, since
two-batch overlap calls the halves and not `dispatch` and `combine`; what is a barrier is the receiving
half. Where top-k is left to the kernel (bypassed), nothing is counted.
"""

from __future__ import annotations

from typing import Any

from moetrace.adapters.base import (
    ExpertParallel,
    LayerMatch,
    ModelMatch,
    RouteCounter,
    Target,
    layer_numbers,
)
from moetrace.adapters.targets import count, experts_call, layer_forward, phase
from moetrace_schemas.enums import CountKind, Phase

HALVES = (
    ("dispatch_a", Phase.PERMUTE),
    ("dispatch_b", Phase.DISPATCH),
    ("combine_a", Phase.UNPERMUTE),
    ("combine_b", Phase.COMBINE),
)
SHARED_NAMES = ("shared_experts", "shared_expert")


class SGLangAdapter:
    """Modules with `run_moe_core` and a dispatcher."""

    name = "sglang"
    looks_for = (
        "modules with the method `run_moe_core` and a `dispatcher` with dispatch and combine, as in SGLang"
    )

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        modules = dict(model.named_modules())
        found = [
            (path, module, modules.get(path.rpartition(".")[0]) if path else None)
            for path, module in modules.items()
            if callable(getattr(module, "run_moe_core", None))
            and all(
                callable(getattr(getattr(module, "dispatcher", None), m, None))
                for m in ("dispatch", "combine")
            )
        ]
        own = [getattr(module, "layer_id", None) for _, module, _ in found]
        numbers = [number for number in own if isinstance(number, int)]
        if len(set(numbers)) != len(found):
            numbers = layer_numbers([path for path, *_ in found])
        layers = (_layer(*each, number) for each, number in zip(found, numbers, strict=True))
        return ModelMatch(layers=tuple(layers))


def _layer(path: str, experts: Any, around: Any, layer: int) -> LayerMatch:
    children = dict(around.named_children()) if around is not None else {}
    top_k = children.get("topk")
    is_block = top_k is not None
    here = f"{path}." if path else ""
    above = f"{path.rpartition('.')[0]}." if "." in path else ""
    parallel = _parallel(experts)
    targets = [layer_forward(around if is_block else experts, layer, f"{above if is_block else here}forward")]
    phases = {Phase.OUTSIDE, Phase.ROUTER, Phase.EXPERT_GEMM}
    notes = []
    if "gate" in children:
        targets.append(phase(children["gate"], "forward", layer, f"{above}gate.forward", Phase.ROUTER))
    if top_k is not None:
        targets += [
            phase(top_k, "forward", layer, f"{above}topk.forward", Phase.ROUTER),
            count(top_k, "forward", layer, f"{above}topk.forward", _count_ids),
        ]
        notes.append("ids are those that the kernel runs: physical where experts are replicated")
    else:
        phases.discard(Phase.ROUTER)
        notes.append("the router is not a part of the block: neither timed nor counted")
    for name in SHARED_NAMES:
        if children.get(name) is not None:
            phases.add(Phase.SHARED_EXPERT)
            # Which of several forwards a batch takes is decided per call.
            targets.append(
                phase(
                    children[name],
                    "forward",
                    layer,
                    f"{above}{name}.forward",
                    Phase.SHARED_EXPERT,
                    per_step=False,
                )
            )
    targets += _dispatcher(experts.dispatcher, layer, f"{here}dispatcher", parallel)
    targets.append(experts_call(experts, "run_moe_core", layer, f"{here}run_moe_core"))
    phases |= {Phase.PERMUTE, Phase.UNPERMUTE}
    if parallel is None:
        notes.append("no expert parallelism: no exchange to time")
    else:
        phases |= {Phase.DISPATCH, Phase.COMBINE}
        targets.append(
            count(experts, "run_moe_core", layer, f"{here}run_moe_core", _count_received, CountKind.RECEIVED)
        )
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=SGLangAdapter.name,
        num_experts=int(experts.num_experts),
        num_local_experts=int(experts.num_local_experts),
        targets=tuple(targets),
        phases=tuple(known for known in Phase if known in phases),
        counted=top_k is not None,
        sentinels=True,
        exact_rows=False,
        parallel=parallel,
        notes=tuple(notes),
    )


def _dispatcher(dispatcher: Any, layer: int, name: str, parallel: ExpertParallel | None) -> list[Target]:
    if all(callable(getattr(dispatcher, half, None)) for half, _ in HALVES):
        return [phase(dispatcher, half, layer, f"{name}.{half}", kind) for half, kind in HALVES]
    to, back = (Phase.PERMUTE, Phase.UNPERMUTE) if parallel is None else (Phase.DISPATCH, Phase.COMBINE)
    return [
        phase(dispatcher, "dispatch", layer, f"{name}.dispatch", to),
        phase(dispatcher, "combine", layer, f"{name}.combine", back),
    ]


def _parallel(experts: Any) -> ExpertParallel | None:
    size, rank = int(getattr(experts, "moe_ep_size", 1)), int(getattr(experts, "moe_ep_rank", 0))
    if size == 1:
        return None
    import torch.distributed as dist

    # Ranks of one group are neighbours, unless tensor parallelism inside experts lies between them.
    here = dist.get_rank() if dist.is_available() and dist.is_initialized() else rank
    return ExpertParallel(rank=rank, size=size, group=here - rank)


def _count_ids(
    counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    ids = getattr(result, "topk_ids", None)
    if ids is not None:
        counter.add(index, ids)


def _count_received(
    counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    # run_moe_core(dispatch_output): rows per local expert on the host, or on the device in low-latency mode.
    dispatched = args[0] if args else kwargs["dispatch_output"]
    received = getattr(dispatched, "num_recv_tokens_per_expert", None)
    if received is None:
        received = getattr(dispatched, "masked_m", None)
    if received is not None:
        counter.add_counts(index, received, 0)
