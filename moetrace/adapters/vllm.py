"""vLLM: MoE runners, whose router is an object, and whose kernels prepare, compute and finalize.

Runners sit behind a custom operator that torch.compile does not look into, so what is wrapped is what
that operator calls; on CPUs and TPUs they are traced into the graph instead, where nothing can be wrapped
once that is made. With experts that are replicated, a router's choice is counted by logical expert,
before a replica is taken for it, and by physical one, behind that. Monolithic kernels take router logits:
routing, exchange and experts are one call, reported as `fused` and not counted. With full CUDA graphs
wrappers run while the graph is captured.
"""

from __future__ import annotations

import functools
import logging
import sys
from functools import partial
from typing import Any

from moetrace.adapters.base import (
    ExpertParallel,
    LayerMatch,
    ModelMatch,
    RouteCounter,
    Target,
    layer_numbers,
)
from moetrace.adapters.routes import weight_sums
from moetrace.adapters.targets import count, experts_call, phase
from moetrace.adapters.vllm_engine import engine_calls
from moetrace.record.sites import Role
from moetrace_schemas.enums import CountKind, Phase

logger = logging.getLogger("moetrace")

KERNEL = ("_prepare", "_fused_experts", "_finalize")


class VllmAdapter:
    """Modules with a router that selects experts, and routed experts."""

    name = "vllm"
    looks_for = (
        "modules with a `router` that has `select_experts`, and `routed_experts`, as vLLM's MoE runners"
    )

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        found = [
            (path, module)
            for path, module in model.named_modules()
            if callable(getattr(getattr(module, "router", None), "select_experts", None))
            and hasattr(module, "routed_experts")
        ]
        numbers = layer_numbers([path for path, _ in found])
        layers = (_layer(path, module, number) for (path, module), number in zip(found, numbers, strict=True))
        return ModelMatch(layers=tuple(layers), engine_calls=engine_calls() if found else ())


def _layer(path: str, runner: Any, layer: int) -> LayerMatch:
    here = f"{path}." if path else ""
    entry = "_forward_impl" if hasattr(runner, "_forward_impl") else "forward"
    experts, config = runner.routed_experts, runner.moe_config
    replicated = getattr(runner.router, "eplb_state", None) is not None
    parallel = _parallel(config)
    targets = [
        Target(owner=runner, attribute=entry, role=Role.LAYER, layer=layer, name=f"{here}{entry}"),
    ]
    if getattr(runner, "gate", None) is not None:
        targets.append(phase(runner.gate, "forward", layer, f"{here}gate.forward", Phase.ROUTER))
    phases = {Phase.OUTSIDE}
    fused: tuple[Phase, ...] = ()
    notes = []
    whole = bool(getattr(experts.quant_method, "is_monolithic", False))
    elsewhere = _counted_elsewhere(config)
    if whole:
        phases.add(Phase.FUSED)
        fused = (Phase.ROUTER, Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE)
        notes.append("one kernel routes and computes: its phases cannot be told apart, ids are not counted")
        name = f"{here}routed_experts.forward_monolithic"
        targets.append(experts_call(experts, "forward_monolithic", layer, name, Phase.FUSED))
    else:
        phases |= {Phase.ROUTER, Phase.EXPERT_GEMM}
        name = f"{here}router.select_experts"
        targets += [
            phase(runner.router, "select_experts", layer, name, Phase.ROUTER),
            *([] if elsewhere else _counts(runner, layer, f"{here}router", replicated)),
            *_compute(runner, layer, f"{here}routed_experts", parallel),
        ]
        if _modular_kernel(experts) is not None:
            phases |= {Phase.PERMUTE, Phase.UNPERMUTE}
        if elsewhere:
            notes.append(
                "ids are counted by the first rank of the tensor-parallel group: all have its tokens"
            )
        elif replicated:
            notes.append("counted by logical expert, and by physical one where replicas are told apart")
    if parallel is None:
        notes.append("no expert parallelism: no exchange to time")
    else:
        phases |= {Phase.DISPATCH, Phase.COMBINE}
        targets += _naive_exchange(runner, layer, here)
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=VllmAdapter.name,
        num_experts=int(config.num_logical_experts if replicated else config.num_experts),
        num_physical=int(config.num_experts) if replicated else 0,
        received_logical=True,
        num_local_experts=int(config.num_local_experts),
        targets=tuple(targets),
        phases=tuple(known for known in Phase if known in phases),
        fused=fused,
        counted=not whole and not elsewhere,
        weight_sums=weight_sums(runner.router),
        sentinels=True,
        exact_rows=False,
        parallel=parallel,
        notes=tuple(notes),
    )


def _counted_elsewhere(config: Any) -> bool:
    """Whether another rank of the tensor-parallel group routes the very same tokens, and counts them."""
    module = sys.modules.get("vllm.distributed.parallel_state")
    if module is None or getattr(config, "is_sequence_parallel", False):
        return False
    return getattr(module, "_TP", None) is not None and module.get_tensor_model_parallel_rank() != 0


def _counts(runner: Any, layer: int, name: str, replicated: bool) -> list[Target]:
    router, ids = runner.router, partial(_count_ids, runner)
    if not replicated:
        return [count(router, "select_experts", layer, f"{name}.select_experts", ids)]
    return [
        count(router, "_compute_routing", layer, f"{name}._compute_routing", ids),
        count(router, "select_experts", layer, f"{name}.select_experts", ids, CountKind.PHYSICAL),
    ]


def _compute(runner: Any, layer: int, name: str, parallel: ExpertParallel | None) -> list[Target]:
    """The call of the experts, in three parts where the kernel is a modular one."""
    experts = runner.routed_experts
    targets = [experts_call(experts, "forward_modular", layer, f"{name}.forward_modular")]
    kernel = _modular_kernel(experts)
    if kernel is None:
        return targets
    prepare, compute, finalize = KERNEL
    to, back = (Phase.PERMUTE, Phase.UNPERMUTE) if parallel is None else (Phase.DISPATCH, Phase.COMBINE)
    targets.append(phase(kernel, prepare, layer, f"{name}.{prepare}", to))
    if parallel is not None:
        look = partial(_count_received, runner)
        targets.append(count(kernel, prepare, layer, f"{name}.{prepare}", look, CountKind.RECEIVED))
    return [
        *targets,
        experts_call(kernel, compute, layer, f"{name}.{compute}"),
        phase(kernel, finalize, layer, f"{name}.{finalize}", back),
    ]


def _modular_kernel(experts: Any) -> Any | None:
    kernel = getattr(getattr(experts.quant_method, "moe_kernel", None), "impl", None)
    return kernel if all(callable(getattr(kernel, part, None)) for part in KERNEL) else None


def _naive_exchange(runner: Any, layer: int, here: str) -> list[Target]:
    """Where the kernel does not exchange rows, the runner gathers and scatters them."""
    if not getattr(runner, "do_naive_dispatch_combine", False):
        return []
    return [
        phase(runner, "_maybe_dispatch", layer, f"{here}_maybe_dispatch", Phase.DISPATCH),
        phase(runner, "_maybe_combine", layer, f"{here}_maybe_combine", Phase.COMBINE),
    ]


def _parallel(config: Any) -> ExpertParallel | None:
    said = getattr(config, "moe_parallel_config", None)
    if said is None or not said.use_ep or said.ep_size == 1:
        return None
    import torch.distributed as dist

    rank = int(said.ep_rank)
    here = dist.get_rank() if dist.is_available() and dist.is_initialized() else rank
    return ExpertParallel(rank=rank, size=int(said.ep_size), group=here - rank)


def _count_ids(
    runner: Any, counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    # select_experts(..), _compute_routing(..) -> (weights, ids)
    weights, ids = result[0], result[1]
    context = getattr(sys.modules.get("vllm.forward_context"), "_forward_context", None)
    if getattr(runner, "do_naive_dispatch_combine", False):
        own = _own_rows(runner, context, int(ids.shape[0]))
        if own is None:
            _say_unknown()
            return
        weights, ids = weights[own], ids[own]
    # Which rows of the batch are padding, [T] on the device, where the engine says it.
    counter.add(index, ids, padding=getattr(context, "is_padding", None))
    counter.check_weights(index, weights)


@functools.cache
def _say_unknown() -> None:
    logger.warning(
        "moetrace: vLLM gathers tokens of several ranks and does not say whose they are: "
        "to count all would count each token on every rank, so that none are counted there"
    )


def _own_rows(runner: Any, context: Any, rows: int) -> slice | None:
    """Rows of this rank among those of all ranks that were gathered before they were routed.

    None where it is not said which they are.
    """
    sizes = getattr(getattr(context, "dp_metadata", None), "local_sizes", None) or []
    said = runner.moe_config.moe_parallel_config
    ranks = {
        int(getattr(said, f"{kind}_size", 0)): int(getattr(said, f"{kind}_rank", 0)) for kind in ("ep", "dp")
    }
    rank = ranks.get(len(sizes), -1)
    if rank < 0 or sum(sizes) != rows:
        return None
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def _count_received(
    runner: Any, counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    # _prepare(..) -> (rows, scales, rows per local expert if the exchange says it, ids, weights)
    counts = getattr(result[2], "expert_num_tokens", None)
    local_of = getattr(runner.routed_experts, "expert_map", None)
    if counts is None or local_of is None:
        return
    physical = _at(counts, local_of)
    replicas = getattr(getattr(runner.router, "eplb_state", None), "logical_to_physical_map", None)
    counter.add_counts(index, physical if replicas is None else _at(physical, replicas).sum(-1), 0)


def _at(values: Any, places: Any) -> Any:
    """The value at each place; 0 at places below 0."""
    places = places.long()
    return values[places.clamp(min=0)] * (places >= 0)
