"""vLLM: MoE runners, whose router is an object, and whose kernels prepare, compute and finalize.

Runners sit behind a custom operator that torch.compile does not look into, so what is wrapped is what
that operator calls. Monolithic kernels take router logits: routing, exchange and experts are one call,
reported as `fused` and not counted. With full CUDA graphs wrappers run while the graph is captured.
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
from moetrace.adapters.routes import weight_sums
from moetrace.adapters.targets import count, experts_call, phase
from moetrace.record.sites import Role
from moetrace_schemas.enums import Phase

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
        return ModelMatch(layers=tuple(layers))


def _layer(path: str, runner: Any, layer: int) -> LayerMatch:
    here = f"{path}." if path else ""
    entry = "_forward_impl" if hasattr(runner, "_forward_impl") else "forward"
    experts, config = runner.routed_experts, runner.moe_config
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
            count(runner.router, "select_experts", layer, name, _count_ids),
            *_compute(experts, layer, f"{here}routed_experts", parallel),
        ]
        if _modular_kernel(experts) is not None:
            phases |= {Phase.PERMUTE, Phase.UNPERMUTE}
        notes.append("ids are those that the kernel runs: physical where experts are replicated")
    if parallel is None:
        notes.append("no expert parallelism: no exchange to time")
    else:
        phases |= {Phase.DISPATCH, Phase.COMBINE}
        targets += _naive_exchange(runner, layer, here)
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=VllmAdapter.name,
        num_experts=int(config.num_experts),
        num_local_experts=int(config.num_local_experts),
        targets=tuple(targets),
        phases=tuple(known for known in Phase if known in phases),
        fused=fused,
        counted=not whole,
        weight_sums=weight_sums(runner.router),
        sentinels=True,
        exact_rows=False,
        parallel=parallel,
        notes=tuple(notes),
    )


def _compute(experts: Any, layer: int, name: str, parallel: ExpertParallel | None) -> list[Target]:
    """The call of the experts, in three parts where the kernel is a modular one."""
    targets = [experts_call(experts, "forward_modular", layer, f"{name}.forward_modular")]
    kernel = _modular_kernel(experts)
    if kernel is None:
        return targets
    prepare, compute, finalize = KERNEL
    to, back = (Phase.PERMUTE, Phase.UNPERMUTE) if parallel is None else (Phase.DISPATCH, Phase.COMBINE)
    return [
        *targets,
        phase(kernel, prepare, layer, f"{name}.{prepare}", to),
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
    counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    # select_experts(..) -> (weights, ids)
    counter.add(index, result[1])
    counter.check_weights(index, result[0])
