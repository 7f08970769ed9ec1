"""Hugging Face transformers 5: routers and grouped experts, found by capability and not by class name.

A MoE block has a child `experts` and a child router (`gate` or `router`); most routers return
(logits, weights, ids) and most experts are called as experts(hidden [T, H], ids [T, K], weights [T, K]);
moetrace.adapters.routes knows the rest. Blocks whose experts are called one by one are transformers 4
style and found by moetrace.adapters.transformers_v4.
Expert parallelism (transformers.distributed.expert_parallel) replaces the experts' forward by a
closure over an implementation object; its `_dispatch_tokens`, `experts_forward` and
`_combine_tokens` are wrapped on that object, and the collectives inside by the names that its module
imported.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

from moetrace.adapters.base import (
    Call,
    DispatchResult,
    ExpertParallel,
    LayerMatch,
    ModelMatch,
    Target,
    layer_numbers,
)
from moetrace.adapters.routes import RouteReader, experts_of, is_container, top_k_of, weight_sums
from moetrace.adapters.targets import count, exchange, experts_call, function, layer_forward, phase
from moetrace.record.sites import Role
from moetrace_schemas.enums import Phase

ROUTER_NAMES = ("gate", "router")
SHARED_NAMES = ("shared_experts", "shared_expert", "shared_mlp")
GEMM_HELPERS = ("_grouped_linear", "_batched_linear")
EXPERTS_MODULE = "transformers.integrations.moe"
PARALLEL_MODULE = "transformers.distributed.expert_parallel"
WAIT_OWNERS = ("transformers.distributed.parallel_utils", "torch.distributed._functional_collectives")


class TransformersAdapter:
    """MoE blocks of transformers 5 models, with and without expert parallelism."""

    name = "transformers"
    looks_for = (
        "modules with a child `experts` (grouped, called with hidden states, expert ids and weights) "
        "and a child `gate` or `router`, as in transformers 5"
    )

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        blocks = []
        modules = dict(model.named_modules())
        for path, block in modules.items():
            children = dict(block.named_children())
            experts = children.get("experts")
            router_name = next((name for name in ROUTER_NAMES if name in children), None)
            if experts is None or router_name is None or is_container(experts):
                continue
            blocks.append((path, block, children, router_name))
        numbers = layer_numbers([path for path, *_ in blocks])
        parents = [_parent(path, modules) for path, *_ in blocks]
        layers = []
        for at, ((path, block, children, router_name), number) in enumerate(
            zip(blocks, numbers, strict=True)
        ):
            parent = parents[at]
            # Two blocks in one layer serve two kinds of tokens (text, images): a step may have one kind.
            alone = parent is None or sum(other is parent for other in parents) == 1
            siblings = parent if not any(other is parent for other in parents[:at]) else None
            shared = _shared(path, children, siblings)
            layers.append(_layer(path, block, children, router_name, number, shared, every_step=alone))
        return ModelMatch(layers=tuple(layers))


def _parent(path: str, modules: dict[str, Any]) -> Any | None:
    """The module around a block; None where that is a mere list of layers."""
    parent = modules.get(path.rpartition(".")[0]) if path else None
    return None if parent is None or is_container(parent) else parent


def _shared(path: str, children: dict[str, Any], parent: Any) -> list[tuple[str, Any]]:
    """(path, module) of shared experts: children of the block, or its siblings in the decoder layer."""
    here = f"{path}." if path else ""
    found = [(f"{here}{name}", children[name]) for name in SHARED_NAMES if name in children]
    if found or parent is None:
        return found
    above = f"{path.rpartition('.')[0]}."
    siblings = dict(parent.named_children())
    return [(f"{above}{name}", siblings[name]) for name in SHARED_NAMES if name in siblings]


def _layer(
    path: str,
    block: Any,
    children: dict[str, Any],
    router_name: str,
    layer: int,
    shared: list[tuple[str, Any]],
    *,
    every_step: bool,
) -> LayerMatch:
    experts, router = children["experts"], children[router_name]
    here = f"{path}." if path else ""
    implementation = parallel_implementation(experts)
    # A decoder layer that holds router and experts itself is not a block: attention would be inside.
    is_block = not any("attn" in name or "attention" in name for name in children)
    parallel = _parallel(implementation) if implementation is not None else None
    num_local = experts_of(experts, router, block) or _rows_of(router)
    num_experts = num_local * (parallel.size if parallel else 1)
    reader = RouteReader(
        num_experts,
        top_k_of(router, block, getattr(experts, "config", None)),
        dense_scores=not _takes_ids(experts),
    )
    targets: list[Target] = [layer_forward(block, layer, f"{here}forward")] if is_block else []
    name = f"{here}{router_name}.forward"
    targets += [
        phase(router, "forward", layer, name, Phase.ROUTER),
        count(router, "forward", layer, name, reader.router),
    ]
    targets += [phase(it, "forward", layer, f"{at}.forward", Phase.SHARED_EXPERT) for at, it in shared]
    phases = [Phase.OUTSIDE, Phase.ROUTER]
    if shared:
        phases.append(Phase.SHARED_EXPERT)
    helpers = _gemm_helpers(experts)
    targets += helpers
    targets += [
        experts_call(experts, "forward", layer, f"{here}experts.forward", Phase.FUSED),
        count(experts, "forward", layer, f"{here}experts.forward", reader.experts),
    ]
    fused: tuple[Phase, ...] = ()
    notes: list[str] = []
    if implementation is None:
        if helpers:
            phases += [Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE]
            notes.append("no expert parallelism: no exchange to time")
        else:
            fused = (Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE)
            phases.append(Phase.FUSED)
            notes.append("experts run as one loop: permute, GEMM and unpermute cannot be told apart")
    else:
        targets += _parallel_targets(implementation, layer, f"{here}experts")
        phases += [Phase.PERMUTE, Phase.DISPATCH, Phase.EXPERT_GEMM, Phase.COMBINE, Phase.UNPERMUTE]
        if not _exchanges_tokens(implementation):
            phases.remove(Phase.DISPATCH)
            notes.append("experts see the whole batch and are summed by an all-reduce: nothing is dispatched")
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=TransformersAdapter.name,
        num_experts=num_experts,
        num_local_experts=num_local,
        targets=tuple(targets if every_step else (replace(target, per_step=False) for target in targets)),
        phases=tuple(phases),
        fused=fused,
        weight_sums=weight_sums(router, block, getattr(experts, "config", None)),
        executed=implementation is None and _takes_ids(experts),
        parallel=parallel,
        notes=tuple(notes),
    )


def _takes_ids(experts: Any) -> bool:
    """Whether experts are called with more than hidden states."""
    try:
        return len(inspect.signature(experts.forward).parameters) > 1
    except (TypeError, ValueError):
        return True


def _rows_of(router: Any) -> int:
    weight = getattr(router, "weight", None)
    return int(weight.shape[0]) if weight is not None and weight.dim() == 2 else 0


def _gemm_helpers(experts: Any) -> list[Target]:
    """The GEMM helpers that the experts' chosen implementation calls, where it calls any."""
    chosen = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    module = sys.modules.get(EXPERTS_MODULE)
    helper = {"grouped_mm": "_grouped_linear", "batched_mm": "_batched_linear"}.get(str(chosen))
    if module is None or helper is None or not hasattr(module, helper):
        return []
    return [function(module, helper, Phase.EXPERT_GEMM)]


def parallel_implementation(experts: Any) -> Any | None:
    """The object behind an expert-parallel forward: the one in its closure that runs local experts."""
    forward = vars(experts).get("forward")
    # Another tool may have wrapped the forward; functools.wraps leaves the way back.
    while forward is not None:
        for cell in getattr(forward, "__closure__", None) or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if hasattr(content, "experts_forward") and hasattr(content, "ep_mesh"):
                return content
        forward = getattr(forward, "__wrapped__", None)
    return None


def _members(implementation: Any) -> list[Any]:
    """The implementation, or those that an automatic one chooses between per call."""
    members = [getattr(implementation, name, None) for name in ("all_to_all", "all_reduce", "megamoe")]
    return [member for member in members if hasattr(member, "experts_forward")] or [implementation]


def _exchanges_tokens(implementation: Any) -> bool:
    return any(hasattr(member, "_dispatch_tokens") for member in _members(implementation))


def _parallel(implementation: Any) -> ExpertParallel:
    from torch.distributed import get_process_group_ranks

    mesh = implementation.ep_mesh
    return ExpertParallel(
        rank=int(mesh.get_local_rank()),
        size=int(mesh.size()),
        group=min(get_process_group_ranks(mesh.get_group())),
    )


def _parallel_targets(implementation: Any, layer: int, here: str) -> list[Target]:
    targets: list[Target] = []
    members = _members(implementation)
    for member in members:
        # Which member runs is decided per call (training or inference).
        every_step = len(members) == 1
        name = f"{here}.experts_forward"
        targets.append(replace(experts_call(member, "experts_forward", layer, name), per_step=every_step))
        if hasattr(member, "_dispatch_tokens") and hasattr(member, "_combine_tokens"):
            targets.append(
                Target(
                    owner=member,
                    attribute="_dispatch_tokens",
                    role=Role.PHASE,
                    phase=Phase.PERMUTE,
                    layer=layer,
                    name=f"{here}._dispatch_tokens",
                    read_dispatch=_read_dispatch,
                    per_step=every_step,
                )
            )
            name = f"{here}._combine_tokens"
            targets.append(
                phase(member, "_combine_tokens", layer, name, Phase.UNPERMUTE, per_step=every_step)
            )
        targets += _collectives(type(member).__module__)
    return targets


def _collectives(module_name: str) -> list[Target]:
    targets = []
    module = sys.modules.get(module_name)
    for attribute, call in (
        ("all_to_all_single", Call.LAUNCH),
        ("all_to_all_single_autograd", Call.LAUNCH),
        ("all_gather_into_tensor", Call.LAUNCH),
    ):
        if module is not None and hasattr(module, attribute):
            targets.append(exchange(module, attribute, f"{module_name}.{attribute}", call))
    reduce = getattr(module, "_AllReduceForward", None)
    if reduce is not None:
        targets.append(exchange(reduce, "apply", f"{module_name}.{reduce.__name__}.apply"))
    for owner_name in WAIT_OWNERS:
        owner = sys.modules.get(owner_name)
        if owner is not None and hasattr(owner, "wait_tensor"):
            targets.append(
                Target(
                    owner=owner,
                    attribute="wait_tensor",
                    role=Role.WAIT,
                    name=f"{owner_name}.wait_tensor",
                    call=Call.WAIT,
                    shared=True,
                    per_step=False,
                )
            )
    return targets


def _read_dispatch(result: Any) -> DispatchResult:
    tokens, local_ids, _, state = result
    return DispatchResult(
        received_ids=local_ids,
        received_rows=int(tokens.shape[0]),
        row_bytes=int(tokens.shape[-1]) * int(tokens.element_size()),
        send_sizes=list(state.send_sizes),
        receive_sizes=list(state.recv_sizes),
    )
