"""A small MoE layer with real all-to-all: the specification that adapters are tested with.

Shapes: T tokens on this rank, H hidden, F expert width, K experts per token, E experts in all,
e local experts, W ranks of the group, N = T * K pairs, R rows received.

Each phase is one method, in the order of the step: route, permute, dispatch, compute, combine,
unpermute. Experts are placed contiguously: rank r holds experts [r * e, (r + 1) * e).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from moetrace.adapters.base import (
    DispatchResult,
    ExpertParallel,
    LayerMatch,
    ModelMatch,
    RouteCounter,
    Target,
    layer_number,
)
from moetrace.adapters.targets import count
from moetrace.record.sites import Role
from moetrace_schemas.enums import CountKind, Phase


@dataclass(frozen=True, slots=True)
class Permuted:
    """Rows sorted by expert: `rows_NH`, the order that undoes it, and counts per expert."""

    rows_NH: torch.Tensor
    order_N: torch.Tensor
    counts_E: torch.Tensor


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows that this rank received, sorted by source rank, and what is needed to send them back."""

    rows_RH: torch.Tensor
    local_ids_R: torch.Tensor
    send_sizes: list[int]
    receive_sizes: list[int]


class _Exchange(torch.autograd.Function):
    """All-to-all of rows whose gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, output_sizes: list[int], input_sizes: list[int], group: Any
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (output_sizes, input_sizes), group
        received = rows.new_empty((sum(output_sizes), rows.shape[1]))
        dist.all_to_all_single(received, rows.contiguous(), output_sizes, input_sizes, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        output_sizes, input_sizes = ctx.sizes
        returned = gradient.new_empty((sum(input_sizes), gradient.shape[1]))
        dist.all_to_all_single(returned, gradient.contiguous(), input_sizes, output_sizes, group=ctx.group)
        return returned, None, None, None


def _exchange(
    rows: torch.Tensor, output_sizes: list[int], input_sizes: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    received: torch.Tensor = cast(Any, _Exchange).apply(rows, output_sizes, input_sizes, group)
    return received


class ReferenceMoE(nn.Module):
    """Top-k softmax router and SwiGLU experts over one process group (or none)."""

    def __init__(
        self, hidden: int, width: int, num_experts: int, top_k: int, group: dist.ProcessGroup | None = None
    ) -> None:
        """Every rank builds all weights from the same seed and keeps its own experts.

        Raises:
            ValueError: experts that do not divide by the group's size, or top_k beyond the experts.
        """
        super().__init__()
        self.ep_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.ep_rank = dist.get_rank(group) if dist.is_initialized() else 0
        if num_experts % self.ep_size:
            raise ValueError(f"num_experts={num_experts}: a multiple of the {self.ep_size} ranks expected")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k}: 1 to {num_experts} expected")
        self.num_experts, self.top_k, self.group = num_experts, top_k, group
        self.num_local_experts = num_experts // self.ep_size
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        first = self.ep_rank * self.num_local_experts
        up = torch.randn(num_experts, hidden, 2 * width) / hidden**0.5
        down = torch.randn(num_experts, width, hidden) / width**0.5
        self.up_eHF = nn.Parameter(up[first : first + self.num_local_experts].clone())
        self.down_eFH = nn.Parameter(down[first : first + self.num_local_experts].clone())

    def route(self, tokens_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and expert ids, both [T, K]."""
        weights_TK, ids_TK = self.gate(tokens_TH).softmax(dim=-1).topk(self.top_k, dim=-1)
        return weights_TK / weights_TK.sum(dim=-1, keepdim=True), ids_TK

    def permute(self, tokens_TH: torch.Tensor, ids_TK: torch.Tensor) -> Permuted:
        """One row per (token, slot) pair, sorted by expert."""
        order_N = torch.argsort(ids_TK.reshape(-1), stable=True)
        counts_E = torch.zeros(self.num_experts, dtype=torch.int64, device=ids_TK.device)
        counts_E.scatter_add_(0, ids_TK.reshape(-1), torch.ones_like(ids_TK.reshape(-1)))
        return Permuted(tokens_TH[order_N // self.top_k], order_N, counts_E)

    def dispatch(self, permuted: Permuted) -> Dispatched:
        """Counts, then rows, to the ranks of their experts."""
        if self.ep_size == 1:
            ids = torch.arange(self.num_experts).repeat_interleave(permuted.counts_E)
            sizes = [len(ids)]
            return Dispatched(permuted.rows_NH, ids, sizes, sizes)
        send_We = permuted.counts_E.view(self.ep_size, self.num_local_experts)
        receive_We = torch.empty_like(send_We)
        dist.all_to_all_single(receive_We, send_We, group=self.group)
        send_sizes, receive_sizes = send_We.sum(dim=1).tolist(), receive_We.sum(dim=1).tolist()
        rows_RH = _exchange(permuted.rows_NH, receive_sizes, send_sizes, self.group)
        local_ids_R = torch.arange(self.num_local_experts).repeat(self.ep_size)
        return Dispatched(
            rows_RH, local_ids_R.repeat_interleave(receive_We.reshape(-1)), send_sizes, receive_sizes
        )

    def compute(self, dispatched: Dispatched) -> torch.Tensor:
        """Local experts over the received rows, [R, H]."""
        rows_RH, ids_R = dispatched.rows_RH, dispatched.local_ids_R
        result_RH = torch.zeros_like(rows_RH)
        for expert in range(self.num_local_experts):
            at = torch.nonzero(ids_R == expert).squeeze(1)
            gate, up = (rows_RH[at] @ self.up_eHF[expert]).chunk(2, dim=-1)
            result_RH = result_RH.index_copy(0, at, (nn.functional.silu(gate) * up) @ self.down_eFH[expert])
        return result_RH

    def combine(self, expert_output_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Expert outputs back to the ranks that sent the rows, [N, H]."""
        if self.ep_size == 1:
            return expert_output_RH
        return _exchange(expert_output_RH, dispatched.send_sizes, dispatched.receive_sizes, self.group)

    def unpermute(
        self, returned_NH: torch.Tensor, permuted: Permuted, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Token order restored, slots weighted and summed, [T, H]."""
        slots_NH = torch.empty_like(returned_NH).index_copy(0, permuted.order_N, returned_NH)
        return (slots_NH.view(*weights_TK.shape, slots_NH.shape[-1]) * weights_TK.unsqueeze(-1)).sum(dim=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [.., H] to hidden states of the same shape."""
        tokens_TH = hidden.reshape(-1, hidden.shape[-1])
        weights_TK, ids_TK = self.route(tokens_TH)
        permuted = self.permute(tokens_TH, ids_TK)
        dispatched = self.dispatch(permuted)
        expert_output_RH = self.compute(dispatched)
        returned_NH = self.combine(expert_output_RH, dispatched)
        return self.unpermute(returned_NH, permuted, weights_TK).view_as(hidden)


_METHODS = (
    ("route", Phase.ROUTER),
    ("permute", Phase.PERMUTE),
    ("dispatch", Phase.DISPATCH),
    ("compute", Phase.EXPERT_GEMM),
    ("combine", Phase.COMBINE),
    ("unpermute", Phase.UNPERMUTE),
)


class ReferenceAdapter:
    """Modules with one method per phase: route, permute, dispatch, compute, combine, unpermute."""

    name = "reference"
    looks_for = "modules with the methods route, permute, dispatch, compute, combine and unpermute"

    def match(self, model: Any) -> ModelMatch:
        """Layers in module order."""
        layers: list[LayerMatch] = []
        for path, module in model.named_modules():
            if all(callable(getattr(module, method, None)) for method, _ in _METHODS):
                layers.append(_layer(path, module, [match.layer for match in layers]))
        return ModelMatch(layers=tuple(layers))


def _layer(path: str, module: Any, taken: list[int]) -> LayerMatch:
    layer = layer_number(path + ".", taken) if path else 0
    here = f"{path}." if path else ""
    targets = [Target(owner=module, attribute="forward", role=Role.LAYER, layer=layer, name=f"{here}forward")]
    for method, phase in _METHODS:
        targets.append(
            Target(
                owner=module,
                attribute=method,
                role=Role.EXPERTS if phase is Phase.EXPERT_GEMM else Role.PHASE,
                phase=phase,
                layer=layer,
                name=f"{here}{method}",
                counts_routes=phase is Phase.ROUTER,
                read_dispatch=_read_dispatch if phase is Phase.DISPATCH else None,
            )
        )
    targets.append(count(module, "compute", layer, f"{here}compute", _count_executed, CountKind.EXECUTED))
    parallel = None
    if module.ep_size > 1:
        group = module.group or dist.group.WORLD
        parallel = ExpertParallel(
            rank=module.ep_rank, size=module.ep_size, group=min(dist.get_process_group_ranks(group))
        )
    return LayerMatch(
        layer=layer,
        path=path,
        adapter=ReferenceAdapter.name,
        num_experts=module.num_experts,
        num_local_experts=module.num_local_experts,
        targets=tuple(targets),
        phases=(Phase.OUTSIDE, *(phase for _, phase in _METHODS)),
        weight_sums=(1.0,),
        parallel=parallel,
    )


def _count_executed(
    counter: RouteCounter, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    # compute(dispatched)
    dispatched = args[0] if args else kwargs["dispatched"]
    counter.add(index, dispatched.local_ids_R.unsqueeze(1))


def _read_dispatch(result: Dispatched) -> DispatchResult:
    return DispatchResult(
        received_ids=result.local_ids_R.unsqueeze(1),
        received_rows=int(result.rows_RH.shape[0]),
        row_bytes=int(result.rows_RH.shape[-1]) * int(result.rows_RH.element_size()),
        send_sizes=result.send_sizes,
        receive_sizes=result.receive_sizes,
    )
