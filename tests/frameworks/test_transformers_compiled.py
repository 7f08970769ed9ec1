"""transformers under torch.compile: the same graphs, numbers and counts with tracing and without."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from moetrace.config import Config  # noqa: E402
from moetrace.context import RankContext  # noqa: E402
from moetrace.testing import MemoryEmitter  # noqa: E402
from moetrace.tracer import Tracer  # noqa: E402
from moetrace_schemas.columns import RowFlag  # noqa: E402
from moetrace_schemas.enums import CountKind, Direction, Phase  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    # Several threads add gradients up in any order, traced or not.
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tiny_model(experts: str, family: str = "Qwen3Moe") -> Any:
    """A whole model of two layers, eight experts, two per token."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        **{"num_local_experts" if family == "Mixtral" else "num_experts": 8},
        num_experts_per_tok=2,
        use_cache=False,
    )
    config._experts_implementation = experts
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.set_experts_implementation(experts)
    return model


def tracer_and_emitter() -> tuple[Tracer, MemoryEmitter]:
    """A tracer without a network."""
    emitter = MemoryEmitter()
    context = RankContext(
        run_id="compiled", rank=0, world_size=1, ep_rank=0, ep_size=1, ep_group=0, host_name="host"
    )
    return Tracer(Config.load({"endpoint": ""}, {}), context, [emitter]), emitter


def run(model: Any, *, backward: bool) -> list[torch.Tensor]:
    """Logits, and gradients where asked for."""
    ids = torch.arange(24).reshape(2, 12) % 64
    if not backward:
        with torch.no_grad():
            return [model(input_ids=ids).logits]
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [output.logits.detach(), output.loss.detach(), *gradients]


def backward_phases(step: Any) -> list[tuple[int, Phase]]:
    """Phases of the backward in order, without what lies between layers."""
    return [
        (row.layer, row.phase)
        for row in step.phases
        if row.direction is Direction.BACKWARD and row.phase is not Phase.OUTSIDE
    ]


def breaks() -> int:
    """Graph breaks since the counters were cleared."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.mark.parametrize(
    ("family", "backend", "experts", "backward"),
    [
        ("Qwen3Moe", "aot_eager", "batched_mm", False),
        ("Qwen3Moe", "aot_eager", "batched_mm", True),
        ("Qwen3Moe", "aot_eager", "grouped_mm", True),
        ("Mixtral", "aot_eager", "batched_mm", True),
        pytest.param("Qwen3Moe", "inductor", "batched_mm", True, marks=NEEDS_COMPILER),
    ],
)
def test_a_compiled_model_has_no_more_graph_breaks_and_the_same_numbers(
    family: str, backend: str, experts: str, backward: bool
) -> None:
    """Graph breaks, outputs and gradients equal those of the compiled model without tracing, bit for bit."""
    model = tiny_model(experts, family)
    torch._dynamo.utils.counters.clear()
    plain = run(torch.compile(model, backend=backend), backward=backward)
    without = breaks()

    eager, emitted = tracer_and_emitter()
    eager.instrument(model)
    with eager.step():
        run(model, backward=backward)
    (expected,) = emitted.wait_for(1)
    eager.shutdown()

    tracer, emitter = tracer_and_emitter()
    tracer.instrument(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend=backend)
    with tracer.step():
        traced = run(compiled, backward=backward)
    (step,) = emitter.wait_for(1)
    assert breaks() == without
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    assert step.experts == expected.experts
    assert [sum(row.counts) for row in step.experts if row.kind is CountKind.ROUTED] == [48, 48]
    for layer in (0, 1):
        phases = {row.phase for row in step.phases if row.layer == layer}
        assert {Phase.ROUTER, Phase.EXPERT_GEMM} <= phases
    assert backward_phases(step) == backward_phases(expected)
    assert bool(backward_phases(step)) == backward
    assert tracer.guard.errors == {}
    tracer.shutdown()


def recomputed(step: Any) -> set[tuple[int, Phase]]:
    """Layers and phases of activation recompute."""
    rows = [row for row in step.phases if row.flags & RowFlag.RECOMPUTE]
    return {(row.layer, row.phase) for row in rows if row.phase is not Phase.OUTSIDE}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing_is_recompute_in_a_compiled_model_too(reentrant: bool) -> None:
    """The phases and pairs of the eager run's recompute, and the compiled model's own numbers bit for bit."""
    model = tiny_model("batched_mm").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch._dynamo.utils.counters.clear()
    plain = run(torch.compile(model, backend="aot_eager"), backward=True)
    without = breaks()
    steps = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        tracer, emitter = tracer_and_emitter()
        tracer.instrument(model)
        runs: Any = torch.compile(model, backend="aot_eager") if compile_it else model
        with tracer.step():
            traced = run(runs, backward=True)
        steps += emitter.wait_for(1)
        assert tracer.guard.errors == {}
        tracer.shutdown()
    assert breaks() == without
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    eager, step = steps
    assert recomputed(step) == recomputed(eager)
    assert {(layer, Phase.EXPERT_GEMM) for layer in (0, 1)} <= recomputed(step)
    totals = {kind: sum(sum(row.counts) for row in step.experts if row.kind is kind) for kind in CountKind}
    assert (totals[CountKind.ROUTED], totals[CountKind.RECOMPUTE]) == (96, 96)
    assert step.experts == eager.experts
