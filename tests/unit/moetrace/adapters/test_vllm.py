"""vLLM against fakes: runner, router, experts and kernel with the names and signatures of vllm 0.32.0."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from frameworks.checks import Traced, Truth, check, trace
from moetrace_schemas.enums import Phase

EXPERTS, TOP_K, HIDDEN = 4, 2, 8


class FusedMoERouter:
    """No module: select_experts(hidden_states, router_logits, topk_indices_dtype, *, input_ids)."""

    def select_experts(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        topk_indices_dtype: torch.dtype | None = None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, ids)."""
        weights, ids = router_logits.softmax(-1).topk(TOP_K)
        return weights, ids.to(topk_indices_dtype)


class FusedMoEKernelModularImpl:
    """Three parts, called in order by apply."""

    def _prepare(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> Any:
        return hidden_states, None, None, topk_ids, topk_weights

    def _fused_experts(self, a1q: torch.Tensor, w1: torch.Tensor) -> torch.Tensor:
        return a1q @ w1

    def _finalize(self, output: torch.Tensor, fused_out: torch.Tensor) -> torch.Tensor:
        return output.copy_(fused_out)

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The modular kernel."""
        a1q, *_ = self._prepare(hidden_states, topk_weights, topk_ids)
        return self._finalize(torch.empty_like(hidden_states), self._fused_experts(a1q, w1))


class RoutedExperts(nn.Module):
    """Holds weights and the quantization method."""

    def __init__(self, *, is_monolithic: bool) -> None:
        super().__init__()
        kernel = SimpleNamespace(impl=None if is_monolithic else FusedMoEKernelModularImpl())
        self.quant_method = SimpleNamespace(is_monolithic=is_monolithic, moe_kernel=kernel)
        self.w13_weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Experts, once routing is known."""
        return self.quant_method.moe_kernel.impl.apply(x, self.w13_weight, topk_ids, topk_weights)

    def forward_monolithic(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routing and experts at once."""
        return x @ self.w13_weight


class MoERunner(nn.Module):
    """forward -> custom operator -> _forward_impl of the layer of that name."""

    def __init__(self, *, is_monolithic: bool, ep_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.router = FusedMoERouter()
        self.routed_experts = RoutedExperts(is_monolithic=is_monolithic)
        self.moe_config = SimpleNamespace(
            num_experts=EXPERTS,
            num_local_experts=EXPERTS // ep_size,
            moe_parallel_config=SimpleNamespace(use_ep=ep_size > 1, ep_size=ep_size, ep_rank=0),
        )
        self.do_naive_dispatch_combine = False

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """Looks its own entry up, as the operator does."""
        return self._forward_impl(hidden_states, router_logits, None)

    def _maybe_dispatch(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> Any:
        return hidden_states, router_logits

    def _maybe_combine(self, shared_output: torch.Tensor | None, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def _forward_impl(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        router_logits = self.gate(hidden_states)
        hidden_states, router_logits = self._maybe_dispatch(hidden_states, router_logits)
        if self.routed_experts.quant_method.is_monolithic:
            out = self.routed_experts.forward_monolithic(x=hidden_states, router_logits=router_logits)
        else:
            weights, ids = self.router.select_experts(
                hidden_states=hidden_states,
                router_logits=router_logits,
                topk_indices_dtype=torch.int32,
                input_ids=input_ids,
            )
            out = self.routed_experts.forward_modular(x=hidden_states, topk_weights=weights, topk_ids=ids)
        return self._maybe_combine(None, out)


class Model(nn.Module):
    """Two sparse blocks, whose `experts` is a runner that calls the gate itself."""

    def __init__(self, *, is_monolithic: bool = False, ep_size: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.mlp = nn.Module()
            layer.mlp.experts = MoERunner(is_monolithic=is_monolithic, ep_size=ep_size)
            layer.mlp.gate = layer.mlp.experts.gate

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers:
            hidden = hidden + layer.mlp.experts(hidden, hidden)
        return hidden


def _trace(monkeypatch: pytest.MonkeyPatch, model: Model, truth: Truth) -> Traced:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    hidden = torch.randn(5, HIDDEN)
    owners = []
    for number, layer in enumerate(model.layers):
        runner: Any = layer.mlp.experts
        runner.gate.register_forward_hook(
            lambda _, args, logits, n=number: truth.add_ids(n, logits.topk(TOP_K).indices, EXPERTS)
        )
        owners += [runner.router, runner.routed_experts.quant_method.moe_kernel.impl or SimpleNamespace()]
    return trace(model, lambda: [model(hidden).detach()], truth=truth, owners=owners)


def test_a_modular_kernel_shows_its_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank: prepare and finalize are permute and unpermute; ids of int32 are counted."""
    truth = Truth()
    traced = _trace(monkeypatch, Model(), truth)
    check(traced, truth, ["router", "permute", "expert_gemm", "unpermute"])
    assert {layer.adapter for layer in traced.report.layers} == {"vllm"}


def test_prepare_and_finalize_are_the_exchange_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With expert parallelism the kernel's first and last part move rows."""
    truth = Truth()
    traced = _trace(monkeypatch, Model(ep_size=2), truth)
    exchanged = "router permute dispatch! permute expert_gemm unpermute combine! unpermute"
    check(traced, truth, exchanged.split(" "))


def test_a_monolithic_kernel_is_fused_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is reported as zero: the phases inside are named as fused, and counts as missing."""
    traced = _trace(monkeypatch, Model(is_monolithic=True), Truth())
    check(traced, Truth(), ["router", "fused"], kinds=())
    layer = traced.report.layers[0]
    assert not layer.counted
    assert Phase.EXPERT_GEMM in layer.fused
    assert not any(sum(row.counts) for record in traced.records for row in record.experts)
