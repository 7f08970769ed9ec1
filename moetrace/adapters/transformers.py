"""Hugging Face transformers 5: routers and grouped experts, found by capability and not by class name.

A MoE block has a child `experts` and a child router (`gate` or `router`); the router returns
(logits, weights, ids) and the experts are called as experts(hidden [T, H], ids [T, K], weights [T, K]).
Expert parallelism (transformers.distributed.expert_parallel) replaces the experts' forward by a
closure over an implementation object; its `_dispatch_tokens`, `experts_forward` and
`_combine_tokens` are wrapped on that object, and the collectives inside by the names that its module
imported.
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
    Target,
    layer_number,
)
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
        layers: list[LayerMatch] = []
        skipped: list[tuple[str, str]] = []
        for path, block in model.named_modules():
            children = dict(block.named_children())
            experts = children.get("experts")
            router_name = next((name for name in ROUTER_NAMES if name in children), None)
            if experts is None or router_name is None:
                continue
            if type(experts).__name__ == "ModuleList":
                skipped.append(
                    (path, "experts is a ModuleList called expert by expert (transformers 4 style)")
                )
                continue
            layers.append(_layer(path, block, children, router_name, [match.layer for match in layers]))
        return ModelMatch(layers=tuple(layers), skipped=tuple(skipped))


def _layer(path: str, block: Any, children: dict[str, Any], router_name: str, taken: list[int]) -> LayerMatch:
    experts, router = children["experts"], children[router_name]
    layer = layer_number(path + ".", taken) if path else 0
    here = f"{path}." if path else ""
    implementation = parallel_implementation(experts)
    # A decoder layer that holds router and experts itself is not a block: attention would be inside.
    is_block = not any("attn" in name or "attention" in name for name in children)
    targets: list[Target] = []
    if is_block:
        targets.append(
            Target(owner=block, attribute="forward", role=Role.LAYER, layer=layer, name=f"{here}forward")
        )
    targets.append(
        Target(
            owner=router,
            attribute="forward",
            role=Role.PHASE,
            phase=Phase.ROUTER,
            layer=layer,
            name=f"{here}{router_name}.forward",
            counts_routes=True,
        )
    )
    for name in SHARED_NAMES:
        if name in children:
            targets.append(
                Target(
                    owner=children[name],
                    attribute="forward",
                    role=Role.PHASE,
                    phase=Phase.SHARED_EXPERT,
                    layer=layer,
                    name=f"{here}{name}.forward",
                )
            )
    phases = [Phase.OUTSIDE, Phase.ROUTER]
    if any(name in children for name in SHARED_NAMES):
        phases.append(Phase.SHARED_EXPERT)
    helpers = _gemm_helpers(experts)
    targets += helpers
    targets.append(
        Target(
            owner=experts,
            attribute="forward",
            role=Role.EXPERTS,
            phase=Phase.FUSED,
            layer=layer,
            name=f"{here}experts.forward",
        )
    )
    num_local = int(getattr(experts, "num_experts", 0)) or _rows_of(router)
    parallel, fused, notes = None, (), []
    if implementation is None:
        if helpers:
            phases += [Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE]
            notes.append("no expert parallelism: no exchange to time")
        else:
            fused = (Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE)
            phases.append(Phase.FUSED)
            notes.append("experts run as one loop: permute, GEMM and unpermute cannot be told apart")
    else:
        parallel = _parallel(implementation)
        targets += _parallel_targets(implementation, layer, f"{here}experts")
        phases += [Phase.PERMUTE, Phase.DISPATCH, Phase.EXPERT_GEMM, Phase.COMBINE, Phase.UNPERMUTE]
        if not _exchanges_tokens(implementation):
            phases.remove(Phase.DISPATCH)
            notes.append("experts see the whole batch and are summed by an all-reduce: nothing is dispatched")
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=TransformersAdapter.name,
        num_experts=num_local * (parallel.size if parallel else 1),
        num_local_experts=num_local,
        targets=tuple(targets),
        phases=tuple(phases),
        fused=fused,
        parallel=parallel,
        notes=tuple(notes),
    )


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
    return [
        Target(
            owner=module,
            attribute=helper,
            role=Role.PHASE,
            phase=Phase.EXPERT_GEMM,
            name=f"{EXPERTS_MODULE}.{helper}",
            shared=True,
        )
    ]


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
        targets.append(
            Target(
                owner=member,
                attribute="experts_forward",
                role=Role.EXPERTS,
                phase=Phase.EXPERT_GEMM,
                layer=layer,
                name=f"{here}.experts_forward",
                per_step=every_step,
            )
        )
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
            targets.append(
                Target(
                    owner=member,
                    attribute="_combine_tokens",
                    role=Role.PHASE,
                    phase=Phase.UNPERMUTE,
                    layer=layer,
                    name=f"{here}._combine_tokens",
                    per_step=every_step,
                )
            )
        targets += _collectives(type(member).__module__)
    return targets


def _collectives(module_name: str) -> list[Target]:
    targets = []
    module = sys.modules.get(module_name)
    for attribute, call in (
        ("all_to_all_single", Call.TIMED),
        ("all_to_all_single_autograd", Call.LAUNCH),
        ("all_gather_into_tensor", Call.TIMED),
    ):
        if module is not None and hasattr(module, attribute):
            targets.append(_exchange(module, attribute, call))
    reduce = getattr(module, "_AllReduceForward", None)
    if reduce is not None:
        targets.append(_exchange(reduce, "apply", Call.TIMED))
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


def _exchange(owner: Any, attribute: str, call: Call) -> Target:
    return Target(
        owner=owner,
        attribute=attribute,
        role=Role.EXCHANGE,
        name=f"{owner.__name__}.{attribute}",
        call=call,
        shared=True,
        per_step=False,
    )


def _read_dispatch(result: Any) -> DispatchResult:
    tokens, local_ids, _, state = result
    return DispatchResult(
        received_ids=local_ids,
        received_rows=int(tokens.shape[0]),
        row_bytes=int(tokens.shape[-1]) * int(tokens.element_size()),
        send_sizes=list(state.send_sizes),
        receive_sizes=list(state.recv_sizes),
    )
