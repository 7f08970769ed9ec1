"""SGLang against fakes: dispatchers, top-k and fused layer with the names and signatures of sglang 0.5.23.

The package itself needs a GPU; what is shown here is that its call styles are kept, that the halves of an
exchange are told apart, and what is counted.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from frameworks.checks import Truth, check, trace
from moetrace.instrument.coverage import CoverageReport
from moetrace_schemas.enums import CountKind, Phase

EXPERTS, TOP_K, HIDDEN = 4, 2, 8
EXCHANGED = ["router", "permute", "dispatch!", "permute", "expert_gemm", "unpermute", "combine!", "unpermute"]


class StandardTopKOutput(NamedTuple):
    """As in sglang.srt.layers.moe.topk."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class DispatchOutput(NamedTuple):
    """As DeepEPNormalDispatchOutput, without the scale."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens_per_expert: list[int]


class TopK(nn.Module):
    """forward(hidden_states, router_logits, *, ..)."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        *,
        num_token_non_padded: torch.Tensor | None = None,
    ) -> StandardTopKOutput:
        """Softmax, then the best k."""
        weights, ids = router_logits.softmax(-1).topk(TOP_K)
        return StandardTopKOutput(weights, ids, router_logits)


class StandardDispatcher:
    """Both calls are made by keyword."""

    def dispatch(self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput) -> DispatchOutput:
        """Nothing moves; the counts are what all ranks would send here."""
        received = torch.bincount(topk_output.topk_ids.reshape(-1), minlength=EXPERTS)[:2]
        return DispatchOutput(
            hidden_states, topk_output.topk_ids, topk_output.topk_weights, received.tolist()
        )

    def combine(self, combine_input: torch.Tensor) -> torch.Tensor:
        """Nothing moves."""
        return combine_input


class DeepEPDispatcher(StandardDispatcher):
    """Each exchange in two halves, as in sglang.srt.layers.moe.token_dispatcher.deepep."""

    def dispatch(self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput) -> DispatchOutput:
        """Issue and receive."""
        self.dispatch_a(hidden_states, topk_output)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput) -> None:
        """Issue."""
        self._state = super().dispatch(hidden_states, topk_output)

    def dispatch_b(self) -> DispatchOutput:
        """Receive."""
        return self._state

    def combine(self, combine_input: torch.Tensor) -> torch.Tensor:
        """Issue and receive."""
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: torch.Tensor) -> None:
        """Issue."""
        self._rows = combine_input

    def combine_b(self) -> torch.Tensor:
        """Receive."""
        return self._rows


class FusedMoE(nn.Module):
    """forward -> dispatcher.dispatch -> run_moe_core -> dispatcher.combine."""

    def __init__(self, layer_id: int, dispatcher: StandardDispatcher, ep_size: int) -> None:
        super().__init__()
        self.layer_id, self.dispatcher = layer_id, dispatcher
        self.num_experts, self.num_local_experts = EXPERTS, EXPERTS // ep_size
        self.moe_ep_size, self.moe_ep_rank = ep_size, 0
        self.w13 = nn.Parameter(torch.randn(HIDDEN, HIDDEN))

    def forward(self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput) -> torch.Tensor:
        """Three calls, by keyword as the package makes them."""
        dispatch_output = self.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
        combine_input = self.run_moe_core(dispatch_output=dispatch_output)
        return self.dispatcher.combine(combine_input=combine_input)

    def run_moe_core(self, dispatch_output: DispatchOutput) -> torch.Tensor:
        """The experts."""
        return dispatch_output.hidden_states @ self.w13


class Block(nn.Module):
    """gate, topk and experts."""

    def __init__(self, layer_id: int, dispatcher: StandardDispatcher, ep_size: int) -> None:
        super().__init__()
        self.gate, self.topk = nn.Linear(HIDDEN, EXPERTS, bias=False), TopK()
        self.experts = FusedMoE(layer_id, dispatcher, ep_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        return self.experts(hidden_states, self.topk(hidden_states, self.gate(hidden_states)))


class Model(nn.Module):
    """Two blocks, numbered as the model numbers its layers."""

    def __init__(self, dispatcher: type[StandardDispatcher], ep_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(layer, dispatcher(), ep_size) for layer in (3, 4))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers:
            hidden_states = hidden_states + layer(hidden_states)
        return hidden_states


def _run(monkeypatch: pytest.MonkeyPatch, model: Model, phases: list[str], ep_size: int) -> CoverageReport:
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    hidden, truth = torch.randn(5, HIDDEN), Truth()
    for layer in (3, 4):
        block: Any = model.layers[layer - 3]
        block.topk.register_forward_pre_hook(
            lambda _, args, layer=layer: truth.add_ids(layer, args[1].topk(TOP_K).indices, EXPERTS)
        )
    dispatchers = [block.experts.dispatcher for block in model.layers]
    traced = trace(model, lambda: [model(hidden).detach()], truth=truth, owners=dispatchers)
    kinds = [CountKind.ROUTED]
    if ep_size > 1:
        kinds.append(CountKind.RECEIVED)
        for layer in (3, 4):
            here = truth.counts[layer, CountKind.ROUTED].clone()
            here[EXPERTS // ep_size :] = 0
            truth.counts[layer, CountKind.RECEIVED] = here
    check(traced, truth, phases, kinds=kinds)
    return traced.report


def test_the_halves_of_an_exchange_are_issue_and_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiving half is the barrier; the issuing half is local work; rows received are counted."""
    report = _run(monkeypatch, Model(DeepEPDispatcher, 2), EXCHANGED, 2)
    assert [layer.layer for layer in report.layers] == [3, 4]
    assert all(layer.adapter == "sglang" for layer in report.layers)


def test_a_dispatcher_in_one_call_is_a_barrier_with_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch and combine are the exchange."""
    _run(monkeypatch, Model(StandardDispatcher, 2), EXCHANGED, 2)


def test_without_expert_parallelism_nothing_is_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch and combine are permute and unpermute."""
    report = _run(
        monkeypatch, Model(StandardDispatcher, 1), ["router", "permute", "expert_gemm", "unpermute"], 1
    )
    assert Phase.DISPATCH not in report.phases
