"""SGLang against stand-ins: dispatchers, top-k, fused layer, runner and map of experts.

Names, parameters and results are those of the wheel of sglang 0.5.23 (read in November 2026): srt/layers/moe/
topk.py, fused_moe_triton/layer.py, ep_moe/layer.py, token_dispatcher/{base,standard,deepep,deepep_v2}.py,
srt/eplb/expert_location.py, srt/model_executor/{model_runner,forward_batch_info}.py. The package itself needs
a GPU; what is shown here is that its call styles are kept, that the halves of an exchange are told apart,
and what is counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum, auto
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import moetrace
from frameworks.checks import Traced, Truth, check, counts_of, trace
from moetrace.testing import MemoryEmitter
from moetrace_schemas.enums import CountKind, ForwardMode, Phase

EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 2, 8, 5
LAYERS = (3, 4)
EXCHANGED = ["router", "permute", "dispatch!", "permute", "expert_gemm", "unpermute", "combine!", "unpermute"]
ALIGNMENT = 128
"""Of rows per expert, for the GEMM that follows normal kernels."""
PHYSICAL_TO_LOGICAL = torch.tensor([0, 2, 1, 3, 0, 2])
"""Slots rank by rank, the same in every layer."""


class StandardTopKOutput(NamedTuple):
    """As in sglang.srt.layers.moe.topk."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
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
    """Both calls are made by keyword."""


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


def _run(
    monkeypatch: pytest.MonkeyPatch, model: Model, phases: list[str] | None, real: int = TOKENS
) -> Traced:
    """Traced steps, of whose tokens the first `real` are no padding; all counts against the test's own."""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    hidden, truth = torch.randn(TOKENS, HIDDEN), Truth()
    for layer, block in zip(LAYERS, model.layers, strict=True):
        fused: Any = block.experts

        def look(_: Any, args: Any, layer: int = layer, block: Any = block, fused: Any = fused) -> None:
            ids = args[1].topk(TOP_K).indices[:real]
            truth.add_ids(layer, ids, EXPERTS)
            if block.topk.places is not None:
                physical = block.topk.places.logical_to_all_physical_map[0][ids, 0]
                truth.add(layer, torch.bincount(physical.reshape(-1), minlength=6), CountKind.PHYSICAL)
                ids = ids[physical // fused.num_local_experts == fused.moe_ep_rank]
            else:
                ids = ids[ids // fused.num_local_experts == fused.moe_ep_rank]
            if fused.moe_ep_size > 1:
                received = torch.bincount(ids.reshape(-1), minlength=EXPERTS)
                truth.add(layer, received, CountKind.RECEIVED)

        block.topk.register_forward_pre_hook(look)
    dispatchers = [block.experts.dispatcher for block in model.layers]
    padded = None if real == TOKENS else torch.tensor(real)
    traced = trace(model, lambda: [model(hidden, padded).detach()], truth=truth, owners=dispatchers)
    check(traced, truth, phases, kinds={kind for _, kind in truth.counts})
    return traced


def test_the_halves_of_an_exchange_are_issue_and_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiving half is the barrier; the issuing half is local work; rows received are counted."""
    report = _run(monkeypatch, Model(DeepEPDispatcher, 2), EXCHANGED).report
    assert [layer.layer for layer in report.layers] == [3, 4]
    assert all(layer.adapter == "sglang" for layer in report.layers)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("form", ["normal", "low latency", "2.x", "expanded"])
def test_rows_received_are_exact_in_every_form(
    monkeypatch: pytest.MonkeyPatch, form: str, replicated: bool
) -> None:
    """Numbers that are rounded up for a GEMM are not taken; replicas count for their logical expert."""
    monkeypatch.setattr(DeepEPDispatcher, "format", form)
    places = moved(monkeypatch, 2) if replicated else None
    traced = _run(monkeypatch, Model(DeepEPDispatcher, 2, places), EXCHANGED)
    kinds = {row.kind for row in traced.records[0].experts}
    assert CountKind.RECEIVED in kinds
    assert (CountKind.PHYSICAL in kinds) == replicated


@pytest.mark.parametrize("replicated", [False, True])
def test_rows_of_padding_are_no_tokens(monkeypatch: pytest.MonkeyPatch, replicated: bool) -> None:
    """Their ids are -1: counted apart, and no fault; a map is not asked for them."""
    places = moved(monkeypatch, 1) if replicated else None
    traced = _run(monkeypatch, Model(StandardDispatcher, 1, places), None, real=3)
    for layer in LAYERS:
        assert counts_of(traced.records[0], CountKind.INVALID)[layer] == [2 * TOP_K]


def test_a_dispatcher_in_one_call_is_a_barrier_with_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch and combine are the exchange; how many rows came is not said."""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    model, hidden = Model(StandardDispatcher, 2), torch.randn(TOKENS, HIDDEN)
    traced = trace(model, lambda: [model(hidden).detach()])
    check(traced, Truth(), EXCHANGED, kinds=())
    assert not any(row.kind is CountKind.RECEIVED for record in traced.records for row in record.experts)


def test_without_expert_parallelism_nothing_is_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch and combine are permute and unpermute."""
    traced = _run(
        monkeypatch, Model(StandardDispatcher, 1), ["router", "permute", "expert_gemm", "unpermute"]
    )
    assert Phase.DISPATCH not in traced.report.phases


def test_hooks_that_the_model_registers_while_it_is_traced_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They replace methods of the dispatcher over our wrapper: both run, and theirs is not taken out."""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    model, emitter, seen = Model(StandardDispatcher, 1), MemoryEmitter(), []
    moetrace.init(run_id="sglang", emitters=[emitter], endpoint="")
    moetrace.instrument(model, strict=True)
    dispatcher: Any = model.layers[0].experts.dispatcher
    dispatcher.register_pre_combine_hook(lambda owner, given: seen.append(owner))
    model(torch.randn(TOKENS, HIDDEN))
    (record,) = emitter.wait_for(1)
    moetrace.shutdown()
    assert Phase.UNPERMUTE in {row.phase for row in record.phases if row.layer == LAYERS[0]}
    model(torch.randn(TOKENS, HIDDEN))
    assert seen == [dispatcher] * 2


def parallel(
    monkeypatch: pytest.MonkeyPatch,
    *,
    rank: int,
    exchanges: bool = False,
    gathered: bool = False,
    context: bool = True,
) -> None:
    """What srt/layers/moe/utils.py, srt/layers/dp_attention.py and srt/runtime_context.py say of a rank."""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    backends = ModuleType("sglang.srt.layers.moe.utils")
    attention = ModuleType("sglang.srt.layers.dp_attention")
    said: Any = {
        backends: {
            "get_moe_a2a_backend": lambda: SimpleNamespace(is_none=lambda: not exchanges),
            "should_use_flashinfer_cutlass_moe_fp4_allgather": lambda: False,
        },
        attention: {"is_dp_attention_enabled": lambda: gathered},
    }
    if context:
        runtime = ModuleType("sglang.srt.runtime_context")
        said[runtime] = {"get_parallel": lambda: SimpleNamespace(attn_tp_rank=rank)}
    else:
        said[attention]["get_attention_tp_rank"] = lambda: rank
    for module, names in said.items():
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("context", [True, False])
def test_tokens_that_all_ranks_route_are_counted_once(monkeypatch: pytest.MonkeyPatch, context: bool) -> None:
    """Without an exchange each rank of the tensor-parallel group has them all: the first one counts."""
    parallel(monkeypatch, rank=0, context=context)
    _run(monkeypatch, Model(StandardDispatcher, 1), None)
    parallel(monkeypatch, rank=1, context=context)
    model, hidden = Model(StandardDispatcher, 1), torch.randn(TOKENS, HIDDEN)
    traced = trace(model, lambda: [model(hidden).detach()])
    assert not any(record.experts for record in traced.records)
    assert all("by the first rank of the tensor-parallel group" in str(x.notes) for x in traced.report.layers)
    assert not any(layer.counted for layer in traced.report.layers)


def test_ranks_that_exchange_rows_each_count_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """There every rank of the attention's group has other tokens."""
    parallel(monkeypatch, rank=1, exchanges=True)
    _run(monkeypatch, Model(DeepEPDispatcher, 2), EXCHANGED)


def test_tokens_that_were_gathered_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's data parallelism without an exchange pads and gathers: the report says so on every rank."""
    for rank in (0, 1):
        parallel(monkeypatch, rank=rank, gathered=True)
        model, hidden = Model(StandardDispatcher, 1), torch.randn(TOKENS, HIDDEN)
        traced = trace(model, lambda model=model, hidden=hidden: [model(hidden).detach()])
        assert not any(record.experts for record in traced.records)
        assert all("gathered before they are routed" in str(layer.notes) for layer in traced.report.layers)


class SGLangForwardMode(IntEnum):
    """sglang.srt.model_executor.forward_batch_info.ForwardMode."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    PREBUILT = auto()
    SPLIT_PREFILL = auto()
    DLLM_EXTEND = auto()


class ModelRunner:
    """Runs a model by batches."""

    def __init__(self, model: Model, is_draft_worker: bool = False) -> None:
        self.model, self.is_draft_worker = model, is_draft_worker

    def forward(
        self,
        forward_batch: Any,
        skip_attn_backend_init: bool | None = None,
        pp_proxy_tensors: Any = None,
        reinit_attn_backend: bool = False,
        split_forward_count: int = 1,
    ) -> Any:
        """One batch."""
        return self.model(torch.randn(TOKENS, HIDDEN))

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> None:
        """Two sizes."""
        for size in (4, 2):
            self.model(torch.randn(size, HIDDEN))


def test_the_engine_says_what_a_batch_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own forward mode; an idle rank's batch and those before there are requests are no load."""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    module = ModuleType("sglang.srt.model_executor.model_runner")
    module.ModelRunner = ModelRunner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before, model, emitter = dict(vars(ModelRunner)), Model(StandardDispatcher, 1).eval(), MemoryEmitter()
    tracer = moetrace.init(run_id="sglang", emitters=[emitter], endpoint="", buffers=32, warmup_steps=0)
    moetrace.instrument(model, strict=True)
    runner, draft = ModelRunner(model), ModelRunner(model, is_draft_worker=True)
    expected = {
        "EXTEND": ForwardMode.PREFILL,
        "SPLIT_PREFILL": ForwardMode.PREFILL,
        "DECODE": ForwardMode.DECODE,
        "TARGET_VERIFY": ForwardMode.DECODE,
        "MIXED": ForwardMode.MIXED,
        "IDLE": ForwardMode.DECODE,
    }
    for name in expected:
        runner.forward(SimpleNamespace(forward_mode=SGLangForwardMode[name]))
    runner.init_cuda_graphs()
    with moetrace.step():
        draft.forward(SimpleNamespace(forward_mode=SGLangForwardMode.DECODE))
        runner.forward(forward_batch=SimpleNamespace(forward_mode=SGLangForwardMode.TARGET_VERIFY))
    records = emitter.wait_for(len(expected) + 3)
    assert tracer.guard.errors == {}
    moetrace.shutdown()
    assert dict(vars(ModelRunner)) == before
    assert [record.forward_mode for record in records[: len(expected)]] == list(expected.values())
    idle, *graphs, last = records[len(expected) - 1 :]
    assert [record.warmup for record in graphs] == [True, True]
    for record in (idle, *graphs):
        assert {row.kind for row in record.experts} == {CountKind.DUMMY}
    assert {row.kind for row in last.experts} == {CountKind.ROUTED}
