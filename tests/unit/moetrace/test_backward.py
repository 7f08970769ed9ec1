"""Backward by phase: real autograd on a fake clock, so that every row's time is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

from moetrace.adapters.reference import Dispatched
from moetrace.testing import FakeTime
from moetrace_schemas.enums import CountKind

from .intervals import lines

Make = Callable[..., Any]

FORWARD_NS = {"route": 1, "permute": 2, "dispatch": 3, "compute": 4, "combine": 5, "unpermute": 6}
"""Time that each phase's forward takes; its backward takes ten times as long."""


class Timed(torch.autograd.Function):
    """Identity that takes time in both directions, and calls a collective in both if it is given one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, time: FakeTime, ns: int, exchange: bool) -> torch.Tensor:
        """Takes `ns`."""
        ctx.time, ctx.ns, ctx.exchange = time, ns, exchange
        spend(time, ns, exchange)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Takes ten times as much."""
        spend(ctx.time, 10 * ctx.ns, ctx.exchange)
        return gradient.clone(), None, None, None


def spend(time: FakeTime, ns: int, exchange: bool) -> None:
    """Let time pass, and twice as much inside of a collective behind it."""
    time.advance(ns)
    if exchange:
        torch.distributed.all_to_all_single(None, None, ns)  # type: ignore[arg-type]


class Block(nn.Module):
    """One method per phase, as moetrace.adapters.reference expects it."""

    def __init__(self, time: FakeTime, exchange: bool = False) -> None:
        super().__init__()
        self.num_experts, self.num_local_experts, self.top_k, self.ep_size, self.ep_rank = 4, 4, 2, 1, 0
        self.group = None
        self.gate = nn.Linear(4, 4, bias=False)
        self.expert = nn.Linear(4, 4)
        self.time, self.exchange = time, exchange

    def _takes(self, name: str, x: torch.Tensor) -> torch.Tensor:
        exchange = self.exchange and name in ("dispatch", "combine")
        result: torch.Tensor = Timed.apply(x, self.time, FORWARD_NS[name], exchange)  # type: ignore[no-untyped-call]
        return result

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids."""
        weights, ids = self._takes("route", self.gate(x)).softmax(-1).topk(2)
        return weights, ids

    def permute(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows."""
        return self._takes("permute", x)

    def dispatch(self, rows: torch.Tensor) -> Dispatched:
        """Rows, in a container with things that are no tensors."""
        rows = self._takes("dispatch", rows)
        return Dispatched(rows, torch.zeros(len(rows), dtype=torch.int64), [3], [3])

    def compute(self, dispatched: Dispatched) -> torch.Tensor:
        """Experts."""
        return self._takes("compute", self.expert(dispatched.rows_RH))

    def combine(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Rows back."""
        return self._takes("combine", rows)

    def unpermute(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Tokens."""
        return self._takes("unpermute", rows * weights.sum(-1, keepdim=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of it."""
        weights, ids = self.route(x)
        dispatched = self.dispatch(self.permute(x, ids))
        return self.unpermute(self.combine(self.compute(dispatched), dispatched), weights)


class Model(nn.Module):
    """Blocks with a residual, an embedding before and a head behind."""

    def __init__(self, time: FakeTime, *, blocks: int = 1, exchange: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.layers = nn.ModuleList(Block(time, exchange) for _ in range(blocks))
        self.time = time
        self.recompute: bool | None = None
        """use_reentrant of activation checkpointing; None without."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        x = self.first(x)
        for layer in self.layers:
            x = x + (
                layer(x)
                if self.recompute is None
                else checkpoint.checkpoint(layer, x, use_reentrant=self.recompute)
            )
        return self.head(x).sum()


def backward_lines(rows: Any) -> list[str]:
    """Rows of the backward direction as `layer phase duration [flags]`, without `outside`."""
    result = []
    for row, line in zip(rows, lines(rows), strict=True):
        layer, phase, _, *words = line.split()
        if words[:1] == ["backward"] and phase != "outside":
            result.append(" ".join([layer, phase, str(row.duration_ns), *words[1:]]))
    return result


@pytest.fixture
def collective(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeTime], None]:
    """Replaces torch's all-to-all by one that takes a known time, before it is wrapped."""

    def replace(time: FakeTime) -> None:
        def all_to_all_single(output: Any, rows: Any, ns: int) -> None:
            time.advance(2 * ns)

        monkeypatch.setattr(torch.distributed, "all_to_all_single", all_to_all_single)

    return replace


def step_of(recording: Any, model: Model, x: torch.Tensor | None = None) -> Any:
    """The record of one training step."""
    with recording.tracer.step():
        model(torch.ones(3, 4) if x is None else x).backward()
    (step,) = recording.records()
    assert recording.tracer.guard.errors == {}
    assert sum(row.duration_ns for row in step.phases) == step.duration_ns
    return step


def test_every_phase_has_its_backward_time(record: Make) -> None:
    """In reverse order, tiling the backward pass, each with exactly the time that its backward took."""
    recording = record()
    model = Model(recording.time, blocks=2)
    recording.tracer.instrument(model)
    step = step_of(recording, model)
    expected = [
        f"{layer} {phase}"
        for layer in (1, 0)
        for phase in (
            "unpermute 60",
            "combine 50 barrier",
            "expert_gemm 40",
            "dispatch 30 barrier",
            "permute 20",
            "router 10",
        )
    ]
    assert backward_lines(step.phases) == expected


def test_the_exchange_inside_a_backward_phase_is_told_apart(
    record: Make, collective: Callable[[FakeTime], None]
) -> None:
    """The collective called by the backward is the barrier, what is around it local work of the phase."""
    recording = record()
    collective(recording.time)
    model = Model(recording.time, exchange=True)
    recording.tracer.instrument(model)
    recording.tracer._installer.functions.hook_collectives()
    step = step_of(recording, model)
    assert backward_lines(step.phases) == [
        "0 unpermute 60",
        "0 combine 50",
        "0 combine 100 barrier",
        "0 expert_gemm 40",
        "0 dispatch 30",
        "0 dispatch 60 barrier",
        "0 permute 20",
        "0 router 10",
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_recompute_is_cut_out_tagged_and_counted_once(
    record: Make, reentrant: bool, collective: Callable[[FakeTime], None]
) -> None:
    """Recomputed phases carry the flag and the forward's time; backward phases keep their own time."""
    recording = record()
    collective(recording.time)
    model = Model(recording.time, exchange=True)
    model.recompute = reentrant
    recording.tracer.instrument(model)
    recording.tracer._installer.functions.hook_collectives()
    step = step_of(recording, model)
    rows = backward_lines(step.phases)
    assert [row for row in rows if "recompute" not in row] == [
        "0 unpermute 60",
        "0 combine 50",
        "0 combine 100 barrier",
        "0 expert_gemm 40",
        "0 dispatch 30",
        "0 dispatch 60 barrier",
        "0 permute 20",
        "0 router 10",
    ]
    recomputed = [row for row in rows if "recompute" in row]
    assert recomputed[:5] == [
        "0 router 1 recompute",
        "0 permute 2 recompute",
        "0 dispatch 3 recompute",
        "0 dispatch 6 barrier recompute",
        "0 expert_gemm 4 recompute",
    ]
    counts = {row.kind: sum(row.counts) for row in step.experts}
    source_side = {kind: counts[kind] for kind in (CountKind.ROUTED, CountKind.RECOMPUTE)}
    assert source_side == {CountKind.ROUTED: 6, CountKind.RECOMPUTE: 6}


def test_gradients_are_those_of_the_untraced_model(record: Make) -> None:
    """Hooks look and change nothing: bit for bit, in the first and in every later backward."""
    recording = record()
    model = Model(recording.time, blocks=2)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        model(x).backward()
        return [x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item,union-attr]

    plain = gradients()
    recording.tracer.instrument(model)
    for _ in range(2):
        with recording.tracer.step():
            traced = gradients()
        assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def test_a_layer_whose_input_needs_no_gradient_ends_with_the_pass(record: Make) -> None:
    """Phases that nothing ends take the time up to the next phase, or to the end of backward."""
    recording = record()
    block = Block(recording.time)
    recording.tracer.instrument(block)
    with recording.tracer.step():
        block(torch.ones(3, 4)).sum().backward()
        recording.time.advance(1000)
    (step,) = recording.records()
    rows = backward_lines(step.phases)
    assert rows[:3] == ["0 unpermute 60", "0 combine 50 barrier", "0 expert_gemm 40"]
    assert sum(int(row.split()[2]) for row in rows) == 160


def test_a_graph_that_is_kept_has_as_many_backward_passes_as_run(record: Make) -> None:
    """Two backwards through one forward are two rows per phase."""
    recording = record()
    model = Model(recording.time)
    recording.tracer.instrument(model)
    with recording.tracer.step():
        loss = model(torch.ones(3, 4))
        loss.backward(retain_graph=True)
        loss.backward()
    (step,) = recording.records()
    assert [row.split()[1:3] for row in backward_lines(step.phases)].count(["expert_gemm", "40"]) == 2


def test_a_backward_after_its_step_records_nothing(record: Make) -> None:
    """Neither into the step that is closed, nor into the one that runs by then."""
    recording = record(buffers=1)
    model = Model(recording.time)
    recording.tracer.instrument(model)
    with recording.tracer.step():
        loss = model(torch.ones(3, 4))
    recording.emitter.wait_for(1)
    while not recording.tracer._buffers.pool._free:
        pass
    with recording.tracer.step():
        loss.backward(retain_graph=True)
    loss.backward()
    first, second = recording.records()
    assert backward_lines(first.phases) == backward_lines(second.phases) == []
    assert recording.tracer.guard.errors == {}


@pytest.mark.parametrize("how", ["no_grad", "inference", "frozen", "off"])
def test_without_gradients_or_when_switched_off_there_is_no_backward(record: Make, how: str) -> None:
    """No hooks, no rows, no faults."""
    recording = record(backward=how != "off")
    model = Model(recording.time)
    recording.tracer.instrument(model)
    if how == "frozen":
        model.requires_grad_(False)
    context: Any = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(how, torch.enable_grad)
    with context(), recording.tracer.step():
        loss = model(torch.ones(3, 4))
        if loss.requires_grad:
            loss.backward()
    (step,) = recording.records()
    assert backward_lines(step.phases) == []
    assert recording.tracer.guard.errors == {}


def test_a_backward_that_fails_passes_its_error_on_and_the_next_step_is_whole(record: Make) -> None:
    """The model's exception is the model's; what was open is forgotten with the step."""
    recording = record()
    model = Model(recording.time)
    recording.tracer.instrument(model)

    def broken(gradient: torch.Tensor) -> None:
        raise ValueError("bad gradient")

    def fails() -> None:
        with recording.tracer.step():
            block = model.layers[0]
            x = model.first(torch.ones(3, 4))
            rows = block.dispatch(block.permute(x, x))
            rows.rows_RH.register_hook(broken)
            block.compute(rows).sum().backward()

    with pytest.raises(ValueError, match="bad gradient"):
        fails()
    with recording.tracer.step():
        model(torch.ones(3, 4)).backward()
    _, second = recording.records()
    assert len(backward_lines(second.phases)) == 6
    assert recording.tracer.guard.errors == {}


def test_a_fault_of_the_clock_inside_backward_is_swallowed_and_counted(record: Make) -> None:
    """Nothing of ours is raised into the engine."""
    recording = record()
    model = Model(recording.time)
    recording.tracer.instrument(model)
    with recording.tracer.step():
        loss = model(torch.ones(3, 4))

        def broken() -> int:
            raise RuntimeError("no time")

        buffer = recording.tracer.buffer
        mark, buffer.mark = buffer.mark, broken
        loss.backward()
        buffer.mark = mark
    assert recording.tracer.guard.errors["record"] > 0
    assert all(parameter.grad is not None for parameter in model.parameters())
