"""Stand-ins for SGLang: dispatchers, top-k, fused layer and map of experts, with their names and signatures.

Names, parameters and results are those of the wheel of sglang 0.5.23 (read in November 2026): srt/layers/moe/
topk.py, fused_moe_triton/layer.py, ep_moe/layer.py, token_dispatcher/{base,standard,deepep,deepep_v2}.py,
srt/eplb/expert_location.py, srt/models/{longcat_flash,inkling_common/moe}.py. The package itself needs a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 2, 8, 5
LAYERS = (3, 4)
ALIGNMENT = 128
"""Of rows per expert, for the GEMM that follows normal kernels."""
PHYSICAL_TO_LOGICAL = torch.tensor([0, 2, 1, 3, 0, 2])
"""Slots rank by rank, the same in every layer."""


class StandardTopKOutput(NamedTuple):
    """As in sglang.srt.layers.moe.topk."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class PackedTopKOutput(NamedTuple):
    """One number of 32 bits per pair: id in the upper half, weight (bfloat16) in the lower one."""

    packed_topk_ids: torch.Tensor
    router_logits: torch.Tensor


class DeepEPNormalDispatchOutput(NamedTuple):
    """Rows of normal kernels; ids are local, the numbers of rows are rounded up."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens_per_expert: list[int]


class DeepEPLLDispatchOutput(NamedTuple):
    """Rows of low-latency kernels; ids are those that were sent."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    masked_m: torch.Tensor
    expected_m: int


class DeepEPv2DispatchOutput(NamedTuple):
    """Rows of 2.x; expanded: each expert's begin at a multiple of the alignment."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor | None
    topk_weights: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor | None = None
    is_expanded: bool = False
    use_masked_gemm: bool = False
    expected_m: int = 0
    masked_max_m: int = 0
    total_expanded: int = 0
    expert_alignment: int = ALIGNMENT


class StandardDispatchOutput(NamedTuple):
    """What stays on the rank."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: StandardTopKOutput


class DeepEPNormalCombineInput(NamedTuple):
    """What the experts hand back."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor | None
    topk_weights: torch.Tensor


class TopK(nn.Module):
    """forward(hidden_states, router_logits, *, ..); where experts are replicated the ids are physical."""

    def __init__(self, places: Any) -> None:
        super().__init__()
        self.places = places

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        *,
        num_token_non_padded: torch.Tensor | None = None,
        expert_location_dispatch_info: Any = None,
        dynamic_expert_bias: torch.Tensor | None = None,
        router_logits_partials: torch.Tensor | None = None,
    ) -> StandardTopKOutput:
        """Softmax, the best k, a replica for each; rows of padding have ids of -1."""
        weights, ids = router_logits.softmax(-1).topk(TOP_K)
        if self.places is not None:
            ids = self.places.logical_to_all_physical_map[0][ids, 0]
        if num_token_non_padded is not None:
            padded = torch.arange(len(ids)) >= num_token_non_padded
            ids = ids.masked_fill(padded.unsqueeze(1), -1)
        return StandardTopKOutput(weights, ids, router_logits)


class BaseDispatcher:
    """Hooks take the place of dispatch and combine on the object, once one is registered."""

    num_local_experts, rank = EXPERTS, 0

    def dispatch(self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput) -> Any:
        """Nothing moves."""
        return StandardDispatchOutput(hidden_states, None, topk_output)

    def combine(self, combine_input: DeepEPNormalCombineInput) -> torch.Tensor:
        """Nothing moves."""
        return combine_input.hidden_states

    def register_pre_combine_hook(self, hook: Callable[..., Any]) -> None:
        """Called before each combine from now on."""
        original = self.combine

        def _combine_with_hook(combine_input: Any) -> torch.Tensor:
            return original(combine_input=hook(self, combine_input) or combine_input)

        self.combine = _combine_with_hook  # type: ignore[method-assign]


class StandardDispatcher(BaseDispatcher):
    """Both calls are made by keyword; with several ranks of experts the ids become local ones."""

    skip_local_expert_mapping = use_aiter_moe_runner = False
    """Whether the kernels take the ids of all ranks' experts."""
    num_local_shared_experts = 0
    local_expert_mapping: torch.Tensor | None = None

    def dispatch(self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput) -> Any:
        """Nothing moves: each rank has all rows."""
        if self.num_local_experts < EXPERTS and self.local_expert_mapping is None:
            # Two ranks of experts, of which a map may have made six slots.
            self.local_expert_mapping = torch.full((2 * self.num_local_experts,), -1)
            first = self.rank * self.num_local_experts
            self.local_expert_mapping[first : first + self.num_local_experts] = torch.arange(
                self.num_local_experts
            )
        if self.local_expert_mapping is not None and not self.skip_local_expert_mapping:
            ids = topk_output.topk_ids
            local = torch.where(ids < 0, -1, self.local_expert_mapping[ids.clamp_min(0)])
            topk_output = topk_output._replace(topk_ids=local)
        return StandardDispatchOutput(hidden_states, None, topk_output)


class DeepEPDispatcher(BaseDispatcher):
    """Each exchange in two halves; every rank sends what this one does."""

    format = "normal"

    def dispatch(self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput) -> Any:
        """Issue and receive."""
        self.dispatch_a(hidden_states, topk_output)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput) -> None:
        """Issue."""
        self._dispatch_intermediate_state = hidden_states, topk_output

    def dispatch_b(self) -> Any:
        """Receive."""
        hidden, (weights, ids, _) = self._dispatch_intermediate_state
        first = self.rank * self.num_local_experts
        local = torch.where((ids >= first) & (ids < first + self.num_local_experts), ids - first, -1)
        counts = torch.bincount(local[local >= 0], minlength=self.num_local_experts)
        aligned = -(-counts // ALIGNMENT) * ALIGNMENT
        if self.format == "low latency":
            return DeepEPLLDispatchOutput(hidden, None, ids, weights, counts.int(), 1)
        if self.format == "expanded":
            ends = aligned.cumsum(0) - aligned + counts
            return DeepEPv2DispatchOutput(hidden, None, None, weights, ends.int(), is_expanded=True)
        if self.format == "2.x":
            return DeepEPv2DispatchOutput(hidden, None, local, weights)
        return DeepEPNormalDispatchOutput(hidden, None, local, weights, aligned.tolist())

    def combine(self, combine_input: DeepEPNormalCombineInput) -> torch.Tensor:
        """Issue and receive."""
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: DeepEPNormalCombineInput) -> None:
        """Issue."""
        self._combine_intermediate_state = combine_input

    def combine_b(self) -> torch.Tensor:
        """Receive."""
        return self._combine_intermediate_state.hidden_states


class FusedMoE(nn.Module):
    """forward -> forward_impl -> dispatcher.dispatch -> run_moe_core -> dispatcher.combine."""

    def __init__(self, layer_id: int, dispatcher: BaseDispatcher, ep_size: int, num_experts: int) -> None:
        super().__init__()
        self.layer_id, self.dispatcher = layer_id, dispatcher
        self.num_experts, self.num_local_experts = num_experts, num_experts // ep_size
        self.moe_ep_size, self.moe_ep_rank = ep_size, ep_size - 1
        dispatcher.num_local_experts, dispatcher.rank = self.num_local_experts, self.moe_ep_rank
        self.w13 = nn.Parameter(torch.randn(HIDDEN, HIDDEN))

    def forward(
        self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput, pre_quant_input: Any = None
    ) -> torch.Tensor:
        """By keyword, as the package makes them."""
        return self.forward_impl(hidden_states, topk_output, pre_quant_input=pre_quant_input)

    def forward_impl(
        self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput, pre_quant_input: Any = None
    ) -> torch.Tensor:
        """Three calls."""
        dispatch_output = self.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
        combine_input = self.run_moe_core(dispatch_output=dispatch_output)
        return self.dispatcher.combine(combine_input=combine_input)

    def run_moe_core(self, dispatch_output: Any) -> DeepEPNormalCombineInput:
        """The experts."""
        return DeepEPNormalCombineInput(dispatch_output.hidden_states @ self.w13, None, torch.empty(0))


class Block(nn.Module):
    """gate, topk and experts."""

    def __init__(self, layer_id: int, dispatcher: BaseDispatcher, ep_size: int, places: Any) -> None:
        super().__init__()
        self.gate, self.topk = nn.Linear(HIDDEN, EXPERTS, bias=False), TopK(places)
        num_experts = EXPERTS if places is None else places.num_physical_experts
        self.experts = FusedMoE(layer_id, dispatcher, ep_size, num_experts)

    def forward(self, hidden_states: torch.Tensor, num_token_non_padded: Any = None) -> torch.Tensor:
        """Hidden states to hidden states."""
        chosen = self.topk(hidden_states, self.gate(hidden_states), num_token_non_padded=num_token_non_padded)
        out: torch.Tensor = self.experts(hidden_states, chosen)
        return out


class OwnRouter(nn.Module):
    """A block that routes by itself and hands the experts what it chose, as srt/models/longcat_flash.py."""

    def __init__(self, layer_id: int, dispatcher: BaseDispatcher, *, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = FusedMoE(layer_id, dispatcher, 1, EXPERTS)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states; packed as in srt/models/inkling_common/moe.py."""
        logits = self.router(hidden_states)
        weights, ids = logits.softmax(-1).topk(TOP_K)
        chosen: Any = StandardTopKOutput(weights, ids, logits)
        if self.packed:
            low = weights.bfloat16().view(torch.int16).int() & 0xFFFF
            chosen = PackedTopKOutput((ids.int() << 16) | low, logits)
        out: torch.Tensor = self.experts(hidden_states, topk_output=chosen)
        return out


class Model(nn.Module):
    """Two blocks, numbered as the model numbers its layers."""

    def __init__(self, dispatcher: type[BaseDispatcher], ep_size: int, places: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(layer, dispatcher(), ep_size, places) for layer in LAYERS)

    def forward(self, hidden_states: torch.Tensor, num_token_non_padded: Any = None) -> torch.Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers:
            hidden_states = hidden_states + layer(hidden_states, num_token_non_padded)
        return hidden_states


def moved(monkeypatch: pytest.MonkeyPatch, ep_size: int) -> Any:
    """The engine's map of six slots, in the modules that hold it."""
    all_physical = torch.full((EXPERTS, 2), -1)
    for slot in range(len(PHYSICAL_TO_LOGICAL) - 1, -1, -1):
        logical = int(PHYSICAL_TO_LOGICAL[slot])
        all_physical[logical] = torch.tensor([slot, int(all_physical[logical, 0])])
    layers = max(LAYERS) + 1
    places = SimpleNamespace(
        physical_to_logical_map=PHYSICAL_TO_LOGICAL.expand(layers, -1),
        logical_to_all_physical_map=all_physical.expand(layers, -1, -1),
        num_physical_experts=len(PHYSICAL_TO_LOGICAL),
        num_logical_experts=EXPERTS,
        ep_size=ep_size,
    )
    top_k, locations = ModuleType("sglang.srt.layers.moe.topk"), ModuleType("sglang.srt.eplb.expert_location")
    top_k.is_expert_remapping_enabled = lambda: True  # type: ignore[attr-defined]
    locations.get_global_expert_location_metadata = lambda: places  # type: ignore[attr-defined]
    for module in (top_k, locations):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return places
