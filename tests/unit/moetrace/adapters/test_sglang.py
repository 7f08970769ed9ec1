"""SGLang against stand-ins: its call styles are kept, halves of an exchange told apart, routes counted.

frameworks/sglang_stand_ins.py says what of the package they stand for; here, too, from the wheel of 0.5.23:
srt/model_executor/{model_runner,forward_batch_info}.py.
"""

from __future__ import annotations

import sys
import weakref
from enum import IntEnum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import moetrace
from frameworks.checks import Traced, Truth, check, counts_of, trace
from frameworks.sglang_stand_ins import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOKENS,
    TOP_K,
    DeepEPDispatcher,
    Model,
    OwnRouter,
    StandardDispatcher,
    StandardTopKOutput,
    moved,
)
from moetrace.adapters import sglang
from moetrace.instrument.routing import CountSite, StepCounter
from moetrace.testing import MemoryEmitter
from moetrace_schemas.enums import CountKind, ForwardMode, Phase

EXCHANGED = ["router", "permute", "dispatch!", "permute", "expert_gemm", "unpermute", "combine!", "unpermute"]


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


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_a_dispatcher_in_one_call_is_a_barrier_with_several_ranks(
    monkeypatch: pytest.MonkeyPatch, kept: bool, replicated: bool
) -> None:
    """Dispatch and combine are the exchange; rows of this rank's experts count, by local or by all ids."""
    monkeypatch.setattr(StandardDispatcher, "skip_local_expert_mapping", kept)
    places = moved(monkeypatch, 2) if replicated else None
    traced = _run(monkeypatch, Model(StandardDispatcher, 2, places), EXCHANGED)
    assert any(row.kind is CountKind.RECEIVED for row in traced.records[0].experts)


def test_rows_of_shared_experts_among_the_routed_are_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ids take places among the local ones: what was received is missing then, and not wrong."""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    monkeypatch.setattr(StandardDispatcher, "num_local_shared_experts", 1)
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("style", ["keyword", "position"])
def test_a_model_that_routes_by_itself_is_counted_at_its_experts(
    monkeypatch: pytest.MonkeyPatch, packed: bool, style: str
) -> None:
    """By the ids that they are called with, packed with their weights or not."""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    torch.manual_seed(0)
    blocks = nn.ModuleList(OwnRouter(layer, StandardDispatcher(), packed=packed) for layer in LAYERS)
    if style == "position":
        for block in blocks:
            experts: Any = block.experts
            block.forward = lambda hidden, block=block, experts=experts: experts(  # type: ignore[method-assign]
                hidden, StandardTopKOutput(*block.router(hidden).topk(TOP_K), None)
            )
    hidden, truth = torch.randn(TOKENS, HIDDEN), Truth()
    for layer, block in zip(LAYERS, blocks, strict=True):
        block.router.register_forward_hook(
            lambda _, args, logits, layer=layer: truth.add_ids(layer, logits.topk(TOP_K).indices, EXPERTS)
        )
    model = nn.Sequential(*blocks)
    traced = trace(model, lambda: [model(hidden).detach()], truth=truth)
    check(traced, truth, ["permute", "expert_gemm", "unpermute"], kinds=(CountKind.ROUTED,))
    assert all(layer.counted for layer in traced.report.layers)


def test_a_top_k_that_a_model_goes_past_at_times_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may do gate and top-k for some batches, as in srt/models/kimi_k3.py: then the experts tell."""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    model, emitter = Model(StandardDispatcher, 1).eval(), MemoryEmitter()
    block: Any = model.layers[0]
    tracer = moetrace.init(run_id="sglang", emitters=[emitter], endpoint="", warmup_steps=0)
    moetrace.instrument(model, strict=True)
    hidden = torch.randn(TOKENS, HIDDEN)

    def fused() -> None:
        logits = block.gate(hidden)
        block.experts(hidden, StandardTopKOutput(*logits.topk(TOP_K), None))

    for batches in ((block,), (fused,), (block, fused, fused), (fused, block)):
        with moetrace.step():
            for batch in batches:
                batch(hidden) if batch is block else batch()
    records = emitter.wait_for(4)
    moetrace.shutdown()
    assert tracer.guard.errors == {}
    assert [sum(row.counts) for record in records for row in record.experts] == [
        TOKENS * TOP_K * batches for batches in (1, 1, 3, 2)
    ]


@pytest.mark.parametrize(
    ("calls", "routed"),
    [
        ("t0 e0 t1 e1", 2),
        ("t0 t1 e0 e1", 2),
        ("t0 t1 e1", 2),
        ("t0 e0 e0", 1),
        ("t0 f1 e0", 2),
        ("t0 t1 f2", 3),
        ("f0 t1 f2 e1", 3),
        ("f0 f1", 2),
        ("t0 s0", 1),
        ("t0 t1 s1 s0", 2),
        ("t0 s0 f1", 2),
    ],
)
def test_top_k_and_experts_need_not_take_turns(
    monkeypatch: pytest.MonkeyPatch, calls: str, routed: int
) -> None:
    """What top-k (t) chose counts once, whenever and however often the experts (e) are called with it, with
    shared experts appended (s) too, as in srt/models/qwen2_moe.py; what they get from elsewhere (f) counts
    too. And so in a second step, which knows nothing of the first.
    """
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    model, emitter = Model(StandardDispatcher, 1).eval(), MemoryEmitter()
    block: Any = model.layers[0]
    tracer = moetrace.init(run_id="sglang", emitters=[emitter], endpoint="", warmup_steps=0)
    moetrace.instrument(model, strict=True)
    hidden = torch.randn(TOKENS, HIDDEN)
    logits = block.gate(hidden)
    for _ in range(2):
        chosen: dict[str, Any] = {}
        with moetrace.step():
            for call in calls.split():
                who, batch = call[0], call[1]
                if who == "t":
                    chosen[batch] = block.topk(hidden, logits)
                elif who == "f":
                    block.experts(hidden, StandardTopKOutput(*logits.topk(TOP_K), None))
                elif who == "s":
                    weights, ids, given = chosen[batch]
                    shared = torch.full((TOKENS, 1), EXPERTS)
                    ids, weights = torch.cat((ids, shared), 1), torch.cat((weights, torch.ones(TOKENS, 1)), 1)
                    block.experts(hidden, StandardTopKOutput(weights, ids, given))
                else:
                    block.experts(hidden, chosen[batch])
    records = emitter.wait_for(2)
    moetrace.shutdown()
    assert tracer.guard.errors == {}
    counted = [sum(row.counts) for record in records for row in record.experts]
    assert counted == [TOKENS * TOP_K * routed] * 2


def test_ids_that_top_k_gave_are_not_kept() -> None:
    """Neither alive, for they are the device's memory, nor beyond a step, nor more than some."""
    choice = sglang._Choice(lambda counter, index, ids: counter.add(index, ids))
    counter = StepCounter([CountSite(0, EXPERTS)], torch.device("cpu"))

    def output() -> StandardTopKOutput:
        ids = torch.zeros(TOKENS, TOP_K, dtype=torch.long)
        return StandardTopKOutput(torch.ones(TOKENS, TOP_K), ids, torch.ones(TOKENS, EXPERTS))

    def counted() -> int:
        return sum(sum(row.counts) for row in counter.rows()) // (TOKENS * TOP_K)

    counter.begin(checking=False)
    kept = [output() for _ in range(sglang.MOST_CHOSEN + 1)]
    for each in kept:
        choice.chosen(counter, 0, (), {}, each)
    assert len(choice._chosen) == sglang.MOST_CHOSEN
    gone = weakref.ref(kept.pop().topk_ids)
    del each
    assert gone() is None
    counter.begin(checking=False)
    choice.given(counter, 0, (None, kept[-1]), {}, None)
    assert counted() == 1


def test_ids_of_a_model_that_routes_by_itself_are_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where experts are moved, nothing says whether they are logical or physical; and that is said."""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    moved(monkeypatch, 1)
    model, hidden = OwnRouter(0, StandardDispatcher(), packed=False), torch.randn(TOKENS, HIDDEN)
    traced = trace(model, lambda: [model(hidden).detach()])
    assert not any(record.experts for record in traced.records)
    (layer,) = traced.report.layers
    assert not layer.counted
    assert "experts are moved: ids are not counted" in str(layer.notes)


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
        attention: {"is_dp_attention_enabled": lambda: False},
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
    before, model, emitter = dict(vars(ModelRunner)), Model(DeepEPDispatcher, 2).eval(), MemoryEmitter()
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
    # What other ranks send to the experts of an idle one is work all the same.
    for record in (idle, *graphs):
        assert {row.kind for row in record.experts} == {CountKind.DUMMY, CountKind.RECEIVED}
    assert {row.kind for row in last.experts} == {CountKind.ROUTED, CountKind.RECEIVED}
