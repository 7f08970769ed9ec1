"""vLLM against fakes: runner, router, experts and kernel with the names and signatures of vllm 0.32.0."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import moetrace
from frameworks.checks import Traced, Truth, check, counts_of, trace
from moetrace.testing import MemoryEmitter
from moetrace_schemas.enums import CountKind, ForwardMode, Phase

EXPERTS, TOP_K, HIDDEN = 4, 2, 8
REPLICAS = torch.tensor([[0, 4], [1, -1], [2, 5], [3, -1]])
"""Physical experts of each logical one: the first and the third have two."""
TOKENS = 5
PHYSICAL_TO_LOGICAL = torch.tensor([0, 1, 2, 3, 0, 2])
EP_SIZE, EP_RANK = 2, 1
LOCAL_OF = torch.tensor([-1, 0, -1, 1, -1, 2])
"""expert_map of rank 1: with round-robin placement it holds physical experts 1, 3 and 5."""


class FusedMoERouter:
    """No module; BaseRouter's steps: the choice, then a replica for it where experts are replicated."""

    def __init__(self, eplb_state: Any = None) -> None:
        self.eplb_state = eplb_state

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = router_logits.softmax(-1).topk(TOP_K)
        return weights, ids

    def _apply_eplb_mapping(self, topk_ids: torch.Tensor) -> torch.Tensor:
        if self.eplb_state is None:
            return topk_ids
        chosen = self.eplb_state.logical_to_physical_map[topk_ids]
        odd = (torch.arange(len(topk_ids)) % 2 == 1).unsqueeze(1) & (chosen[..., 1] >= 0)
        return torch.where(odd, chosen[..., 1], chosen[..., 0])

    def select_experts(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        topk_indices_dtype: torch.dtype | None = None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, ids)."""
        weights, ids = self._compute_routing(
            hidden_states, router_logits, topk_indices_dtype, input_ids=input_ids
        )
        return weights, self._apply_eplb_mapping(ids).to(topk_indices_dtype)


class FusedMoEKernelModularImpl:
    """Three parts, called in order by apply."""

    def __init__(self, expert_map: torch.Tensor | None) -> None:
        self.expert_map = expert_map

    def _prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> Any:
        meta = None
        if self.expert_map is not None:
            # As if every rank had sent here what this one chose.
            local = self.expert_map[topk_ids.long()]
            size = int(self.expert_map.max()) + 1
            meta = SimpleNamespace(
                expert_num_tokens=torch.bincount(local[local >= 0], minlength=size).int(),
                expert_num_tokens_cpu=None,
            )
        return hidden_states, None, meta, topk_ids, topk_weights

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

    def __init__(self, *, is_monolithic: bool, expert_map: torch.Tensor | None) -> None:
        super().__init__()
        self.expert_map = expert_map
        kernel = SimpleNamespace(impl=None if is_monolithic else FusedMoEKernelModularImpl(expert_map))
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

    def __init__(self, *, is_monolithic: bool, ep_size: int, replicated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.router = FusedMoERouter(
            SimpleNamespace(logical_to_physical_map=REPLICAS) if replicated else None
        )
        expert_map = None
        if ep_size > 1:
            expert_map = LOCAL_OF if replicated else torch.tensor([-1, -1, 0, 1])
        self.routed_experts = RoutedExperts(is_monolithic=is_monolithic, expert_map=expert_map)
        physical = len(PHYSICAL_TO_LOGICAL) if replicated else EXPERTS
        self.moe_config = SimpleNamespace(
            num_experts=physical,
            num_logical_experts=EXPERTS,
            num_local_experts=physical // ep_size,
            moe_parallel_config=SimpleNamespace(use_ep=ep_size > 1, ep_size=ep_size, ep_rank=EP_RANK),
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

    def __init__(self, *, is_monolithic: bool = False, ep_size: int = 1, replicated: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.mlp = nn.Module()
            layer.mlp.experts = MoERunner(is_monolithic=is_monolithic, ep_size=ep_size, replicated=replicated)
            layer.mlp.gate = layer.mlp.experts.gate

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers:
            hidden = hidden + layer.mlp.experts(hidden, hidden)
        return hidden


def _trace(monkeypatch: pytest.MonkeyPatch, model: Model, truth: Truth) -> Traced:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    hidden = torch.randn(TOKENS, HIDDEN)
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


def _choices(model: Model, truth: Truth) -> list[torch.Tensor]:
    """Logical ids of each layer in the newest traced step, by the test's own look at the router."""
    seen: list[torch.Tensor] = [torch.empty(0)] * len(model.layers)
    for number, layer in enumerate(model.layers):

        def look(_: Any, args: Any, logits: torch.Tensor, number: int = number) -> None:
            if truth.on:
                seen[number] = logits.topk(TOP_K).indices

        layer.mlp.experts.gate.register_forward_hook(look)
    return seen


@pytest.mark.parametrize("replicated", [False, True])
def test_rows_received_are_told_by_logical_expert(monkeypatch: pytest.MonkeyPatch, replicated: bool) -> None:
    """Local slots, wherever expert_map has them, count for the logical expert whose replica they hold."""
    model, truth = Model(ep_size=EP_SIZE, replicated=replicated), Truth()
    seen = _choices(model, truth)
    traced = _trace(monkeypatch, model, truth)
    for number, layer in enumerate(model.layers):
        physical = layer.mlp.experts.router._apply_eplb_mapping(seen[number]).reshape(-1)
        here = layer.mlp.experts.routed_experts.expert_map[physical] >= 0
        logical = PHYSICAL_TO_LOGICAL[physical] if replicated else physical
        expected = torch.bincount(logical[here], minlength=EXPERTS).tolist()
        for record in traced.records:
            assert counts_of(record, CountKind.RECEIVED)[number] == expected
            assert sum(expected) > 0


def test_replicated_experts_are_counted_by_both_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the router chose by logical expert, what the kernel runs by physical one; sums agree."""
    model, truth = Model(replicated=True), Truth()
    seen = _choices(model, truth)
    traced = _trace(monkeypatch, model, truth)
    check(traced, truth, None)
    assert [layer.num_experts for layer in traced.report.layers] == [EXPERTS, EXPERTS]
    for number, layer in enumerate(model.layers):
        physical = layer.mlp.experts.router._apply_eplb_mapping(seen[number])
        expected = torch.bincount(physical.reshape(-1), minlength=len(PHYSICAL_TO_LOGICAL))
        folded = torch.zeros(EXPERTS, dtype=torch.long).index_add_(0, PHYSICAL_TO_LOGICAL, expected)
        for record in traced.records:
            assert counts_of(record, CountKind.PHYSICAL)[number] == expected.tolist()
            assert counts_of(record)[number] == folded.tolist()


@pytest.mark.parametrize("replicated", [False, True])
def test_rows_of_padding_are_no_tokens(monkeypatch: pytest.MonkeyPatch, replicated: bool) -> None:
    """The engine pads batches, for captured graphs above all, and says which rows are padding."""
    context = ModuleType("vllm.forward_context")
    padding = torch.tensor([False, False, False, True, True])
    context._forward_context = SimpleNamespace(is_padding=padding)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.forward_context", context)
    model, truth = Model(replicated=replicated), Truth()
    seen = _choices(model, truth)
    traced = _trace(monkeypatch, model, truth)
    for record in traced.records:
        for number, ids in enumerate(seen):
            expected = [torch.bincount(part.reshape(-1), minlength=EXPERTS) for part in (ids[:3], ids[3:])]
            assert counts_of(record)[number] == expected[0].tolist()
            assert counts_of(record, CountKind.PADDING)[number] == expected[1].tolist()
            if replicated:
                assert sum(counts_of(record, CountKind.PHYSICAL)[number]) == 3 * TOP_K


def test_tokens_that_are_gathered_before_they_are_routed_count_on_their_own_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every rank routes the tokens of all then; only those between the other ranks' are its own."""
    sizes = [3, TOKENS]
    context = ModuleType("vllm.forward_context")
    said = SimpleNamespace(is_padding=None, dp_metadata=SimpleNamespace(local_sizes=sizes))
    context._forward_context = said  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.forward_context", context)
    others = torch.randn(sizes[0], HIDDEN), torch.randn(sizes[0], EXPERTS)

    def gather(self: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> Any:
        return torch.cat([others[0], hidden_states]), torch.cat([others[1], router_logits])

    monkeypatch.setattr(MoERunner, "_maybe_dispatch", gather)
    monkeypatch.setattr(MoERunner, "_maybe_combine", lambda self, shared, hidden: hidden[sizes[0] :])
    model, truth = Model(ep_size=EP_SIZE), Truth()
    for layer in model.layers:
        layer.mlp.experts.do_naive_dispatch_combine = True
    check(_trace(monkeypatch, model, truth), truth, None)
    said.dp_metadata.local_sizes = None
    unknown = _trace(monkeypatch, model, Truth())
    assert unknown.errors == {}
    assert not any(row.kind is CountKind.ROUTED for record in unknown.records for row in record.experts)


@pytest.mark.parametrize("split", [False, True])
def test_ranks_with_the_same_tokens_count_them_once(monkeypatch: pytest.MonkeyPatch, split: bool) -> None:
    """All ranks of a tensor-parallel group route the same tokens, unless the sequence is split over them."""
    state: Any = ModuleType("vllm.distributed.parallel_state")
    state._TP, state.get_tensor_model_parallel_rank = object(), lambda: 1
    monkeypatch.setitem(sys.modules, state.__name__, state)
    model, truth = Model(), Truth()
    for layer in model.layers:
        layer.mlp.experts.moe_config.is_sequence_parallel = split
    traced = _trace(monkeypatch, model, truth)
    check(traced, truth, None, kinds=[CountKind.ROUTED] if split else [])
    assert all(layer.counted is split for layer in traced.report.layers)
    assert split or not any(row.kind is CountKind.ROUTED for each in traced.records for row in each.experts)


def scheduled(new: int, produced: list[int]) -> Any:
    """A SchedulerOutput of `new` requests and others that have produced so many tokens."""
    return SimpleNamespace(
        scheduled_new_reqs=[object()] * new,
        scheduled_cached_reqs=SimpleNamespace(num_output_tokens=produced),
        total_num_scheduled_tokens=new + len(produced),
    )


def _engine(monkeypatch: pytest.MonkeyPatch, model: Model) -> tuple[Any, Any]:
    """A worker and its runner, in their modules."""

    class GPUModelRunner:
        """Methods that run forwards."""

        def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
            if scheduler_output.total_num_scheduled_tokens:
                model(torch.randn(TOKENS, HIDDEN))

        def _dummy_run(self, num_tokens: int, uniform_decode: bool = False, **more: Any) -> None:
            model(torch.randn(num_tokens, HIDDEN))

        def profile_run(self, randomize_inputs: bool = False) -> None:
            for num_tokens in (4, 2):
                self._dummy_run(num_tokens, is_profile=True)

    class Worker:
        """execute_dummy_batch()."""

        def __init__(self, runner: Any) -> None:
            self.model_runner = runner

        def execute_dummy_batch(self) -> None:
            self.model_runner._dummy_run(1, uniform_decode=True)

    for name, part in (("gpu_model_runner", GPUModelRunner), ("gpu_worker", Worker)):
        module = ModuleType(f"vllm.v1.worker.{name}")
        setattr(module, part.__name__, part)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    runner = GPUModelRunner()
    return Worker(runner), runner


def test_the_engine_says_what_a_step_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the requests of the batch; dummy batches and profile runs are no load, and one is a step at most."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    model, emitter = Model().eval(), MemoryEmitter()
    worker, runner = _engine(monkeypatch, model)
    before = [dict(vars(type(one))) for one in (worker, runner)]
    tracer = moetrace.init(run_id="vllm", emitters=[emitter], endpoint="", buffers=16, warmup_steps=0)
    moetrace.instrument(model, strict=True)
    runner.execute_model(scheduled(2, []))
    runner.execute_model(scheduled(0, [3, 1]))
    runner.execute_model(scheduled(1, [3]))
    runner.execute_model(scheduler_output=scheduled(0, [0, 2]))
    runner.execute_model(scheduled(0, []))
    worker.execute_dummy_batch()
    runner.profile_run()
    records = emitter.wait_for(7)
    assert tracer.guard.errors == {}
    moetrace.shutdown()
    assert [dict(vars(type(one))) for one in (worker, runner)] == before
    assert [record.forward_mode for record in records[:5]] == [
        ForwardMode.PREFILL,
        ForwardMode.DECODE,
        ForwardMode.MIXED,
        ForwardMode.MIXED,
        ForwardMode.DECODE,
    ]
    assert [record.warmup for record in records] == [False] * 5 + [True] * 2
    assert [{row.kind for row in record.experts} for record in records] == [
        *[{CountKind.ROUTED}] * 4,
        *[{CountKind.DUMMY}] * 3,
    ]
    assert len(emitter.records) == 7
