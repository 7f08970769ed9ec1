"""torch.compile: marks and counts are part of the graph, with no graph break and the same numbers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_models import Decoder, Router, Ticks, equal, needs_marks, train
from moetrace.instrument import graph_calls, torch_state
from moetrace.instrument.recorders import key_of
from moetrace.instrument.torch_state import TorchState
from moetrace.record.sites import Role, Site
from moetrace.timing.clock import HostClock
from moetrace_schemas.enums import CountKind, Phase

Make = Callable[..., Any]

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)]
pytestmark = needs_marks
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_backend
@pytest.mark.parametrize(
    "when", ["compiled after", "compiled before", "compiled and used before", "in place"]
)
def test_a_compiled_model_is_recorded_and_counted_without_a_graph_break(
    record: Make, backend: str, when: str
) -> None:
    """One graph, the compiled model's own numbers bit for bit, and the phases and counts of the eager run."""
    model = Decoder()
    plain = train(torch.compile(model, backend=backend, fullgraph=True), model.parameters())
    torch._dynamo.reset()

    eager = record(clock=HostClock(Ticks().now_ns))
    eager.tracer.instrument(model)
    with eager.tracer.step():
        train(model, model.parameters())
    (expected,) = eager.records()

    recording = record(clock=HostClock(Ticks().now_ns))
    run: Any = model
    if when == "in place":
        recording.tracer.instrument(model)
        model.compile(backend=backend, fullgraph=True)
    elif when == "compiled after":
        recording.tracer.instrument(model)
        run = torch.compile(model, backend=backend, fullgraph=True)
    else:
        run = torch.compile(model, backend=backend, fullgraph=True)
        if "used" in when:
            train(run, model.parameters())
        recording.tracer.instrument(run)
    torch._dynamo.utils.counters.clear()
    with recording.tracer.step():
        traced = train(run, model.parameters())
    with recording.tracer.step():
        again = train(run, model.parameters())
    assert equal(plain, traced)
    assert equal(plain, again)
    assert not torch._dynamo.utils.counters["graph_break"]
    first, second = recording.records()
    assert recording.tracer.guard.errors == {}

    def phases(step: Any) -> list[tuple[int, Phase]]:
        return [
            (row.layer, row.phase)
            for row in step.phases
            if row.phase is not Phase.OUTSIDE and row.direction == "forward"
        ]

    assert phases(first) == phases(second) == phases(expected)
    assert {Phase.ROUTER, Phase.FUSED} <= {phase for _, phase in phases(first)}
    assert first.experts == second.experts == expected.experts
    assert [sum(row.counts) for row in first.experts if row.kind is CountKind.ROUTED] == [12, 12]


@pytest.mark.parametrize("when", ["compiled after", "in place"])
def test_a_compiled_forward_is_a_step_of_its_own_where_none_is_open(record: Make, when: str) -> None:
    """As without compilation; and a mask tells padding apart inside the graph."""
    recording = record(clock=HostClock(Ticks().now_ns))

    class Masked(Decoder):
        def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            """Hidden states [1, S, D] to the same."""
            return super().forward(tokens[0])[None] * attention_mask[..., None]

    model = Masked()
    recording.tracer.instrument(model)
    run: Any = (
        torch.compile(model, backend="aot_eager", fullgraph=True) if when == "compiled after" else model
    )
    if when == "in place":
        model.compile(backend="aot_eager", fullgraph=True)
    mask = torch.tensor([[1, 1, 1, 0]])
    with torch.no_grad():
        run(torch.randn(1, 4, 8), attention_mask=mask)
        run(torch.randn(1, 4, 8), attention_mask=mask)
    first, second = recording.records()
    assert (first.step, second.step) == (0, 1)
    for step in (first, second):
        totals = {
            kind: sum(sum(row.counts) for row in step.experts if row.kind is kind) for kind in CountKind
        }
        assert (totals[CountKind.ROUTED], totals[CountKind.PADDING]) == (12, 4)
        assert {row.layer for row in step.phases if row.phase is Phase.ROUTER} == {0, 1}


def test_uninstrument_takes_the_marks_out_of_compiled_code(record: Make) -> None:
    """What was compiled with marks is compiled again without them: nothing of ours runs any more."""
    recording = record(clock=HostClock(Ticks().now_ns))
    model = Decoder()
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="eager", fullgraph=True)
    tokens = torch.randn(3, 8)
    with torch.no_grad(), recording.tracer.step():
        run(tokens)
    recording.tracer.uninstrument(model)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad(), recording.tracer.step():
        run(tokens)
        torch.compile(model, backend=keep, fullgraph=True)(tokens)
    _, second = recording.records()
    assert {row.phase for row in second.phases} == {Phase.OUTSIDE}
    assert "moetrace" not in str(graphs[0].graph)


def test_an_exported_program_holds_no_marks(record: Make) -> None:
    """A program that leaves the process is the model's alone."""
    recording = record()
    model = Decoder()
    recording.tracer.instrument(model)
    program = torch.export.export(model, (torch.randn(3, 8),), strict=True)
    assert "moetrace" not in str(program.graph)


@every_backend
def test_hand_written_phases_are_recorded_in_a_compiled_function(record: Make, backend: str) -> None:
    """Wrapped functions and `phase` blocks keep their places, in one graph."""
    recording = record(clock=HostClock(Ticks().now_ns))
    tracer = recording.tracer
    parts = tracer.wrap(layer=3, num_experts=4, router=Router(), dispatch=lambda x, ids: x.flip(0))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        _, weights, ids = parts.router(tokens)
        rows = parts.dispatch(tokens, ids)
        with tracer.phase("expert_gemm", layer=3):
            rows = torch.relu(rows) * 2
        return rows * weights.sum(-1, keepdim=True)

    run = torch.compile(step, backend=backend, fullgraph=True)
    tokens = torch.randn(5, 8)
    with torch.no_grad(), tracer.step():
        run(tokens)
    (record_,) = recording.records()
    named = [row.phase for row in record_.phases if row.phase not in (Phase.OUTSIDE, Phase.PERMUTE)]
    assert named[:2] == [Phase.ROUTER, Phase.DISPATCH]
    assert Phase.EXPERT_GEMM in named
    assert [sum(row.counts) for row in record_.experts] == [10]


def test_activation_recompute_in_a_compiled_model_is_counted_once(record: Make) -> None:
    """With checkpointing, counts are those of the forward, in the graph as well as outside of it."""
    recording = record(clock=HostClock(Ticks().now_ns))
    model = Decoder()
    recording.tracer.instrument(model)

    def checkpointed(tokens: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(model, tokens, use_reentrant=False)

    run = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    with recording.tracer.step():
        train(run, model.parameters())
    (step,) = recording.records()
    assert [sum(row.counts) for row in step.experts if row.kind is CountKind.ROUTED] == [12, 12]


def test_a_shared_function_wrapper_that_was_retired_is_the_plain_call(record: Make) -> None:
    """A wrapper that could not be taken out (somebody wrapped it again) leaves no marks in later graphs."""
    recording = record()
    model = Decoder()
    recording.tracer.instrument(model)
    ours = model.layers[0].gate.forward

    def theirs(*args: Any) -> Any:
        return ours(*args)

    model.layers[0].gate.forward = theirs  # type: ignore[method-assign]
    recording.tracer.uninstrument(model)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(torch.randn(3, 8))
    assert "moetrace" not in str(graphs[0].graph)


def test_marks_that_begin_outside_a_step_leave_nothing_behind(record: Make) -> None:
    """Ends without a begin, and begins without an end, are no intervals; the guard stays quiet."""
    recording = record(clock=HostClock(Ticks().now_ns))
    tracer = recording.tracer
    key = key_of(tracer)
    site = tracer.sites.add(Site(Role.PHASE, Phase.ROUTER, 0, "here"))
    torch.ops.moetrace.begin([], key, site)
    with tracer.step():
        torch.ops.moetrace.end([], key, site)
        torch.ops.moetrace.begin([], key, site)
    with tracer.step():
        torch.ops.moetrace.end([], key, site)
        torch.ops.moetrace.begin([], 987654, site)
        torch.ops.moetrace.end([], 987654, site)
    assert [{row.phase for row in step.phases} for step in recording.records()] == [{Phase.OUTSIDE}] * 2
    assert tracer.guard.errors == {}


def test_a_step_that_compiles_is_a_warm_up(record: Make) -> None:
    """Its times are those of the compiler; the next step's are the model's."""
    recording = record(clock=HostClock(Ticks().now_ns))
    model = Decoder()
    recording.tracer.instrument(model)
    run = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        with torch.no_grad(), recording.tracer.step():
            run(torch.randn(3, 8))
    assert [step.warmup for step in recording.records()] == [True, False]


def test_switched_off_a_compiled_graph_holds_nothing_of_ours(record: Make) -> None:
    """compiled=False: the plain model's own graph, and the report says that nothing is recorded there."""
    recording = record(clock=HostClock(Ticks().now_ns), compiled=False)
    model = Decoder()
    report = recording.tracer.instrument(model)
    assert any(what == "compiled graphs" and "switched off" in why for what, why in report.skipped)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad(), recording.tracer.step():
        torch.compile(model, backend=keep, fullgraph=True)(torch.randn(3, 8))
    (step,) = recording.records()
    assert {row.phase for row in step.phases} == {Phase.OUTSIDE}
    assert step.experts == ()
    assert "moetrace" not in str(graphs[0].graph)


@NEEDS_COMPILER
@pytest.mark.skipif(
    importlib.util.find_spec("torch._inductor.codegen.custom_extern_kernel_codegen") is None,
    reason="inductor has no register of functions that stand for an op",
)
def test_inductor_keeps_marks_in_order_and_the_work_between_them(record: Make) -> None:
    """In the code that inductor writes, marks are plain calls as in the graph, around what they stand for.

    The experts here do not wait for the router, so that nothing but the marks keeps them behind it.
    """
    from torch._inductor.utils import run_and_get_code

    recording = record(clock=HostClock(Ticks().now_ns))
    tracer = recording.tracer
    experts = tracer.wrap(layer=0, experts=lambda rows: rows @ torch.ones(8, 8)).experts
    router = tracer.wrap(layer=0, router=lambda rows: (rows.softmax(-1) + 1).log()).router
    combine = tracer.wrap(layer=0, combine=lambda one, other: one * other).combine

    def layer(rows: torch.Tensor) -> torch.Tensor:
        chosen = router(rows)
        return combine(experts(rows), chosen)

    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(layer, fullgraph=True), torch.randn(4, 8))
    lines = [line.strip() for line in code.partition("def call(")[2].splitlines()]
    key = key_of(tracer)
    sites = {site.name: number for number, site in enumerate(tracer.sites.sites)}
    numbers = [sites[name] for name in ("wrap.router[0]", "wrap.experts[0]", "wrap.combine[0]")]
    marks = [f"moetrace_{mark}({key}, {number})" for number in numbers for mark in ("begin", "end")]
    assert [line for line in lines if line.startswith("moetrace_")] == marks
    (product,) = [at for at, line in enumerate(lines) if line.startswith("extern_kernels.mm(")]
    assert lines.index(marks[2]) < product < lines.index(marks[3])
    assert "torch.ops.moetrace" not in code


@NEEDS_COMPILER
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed sizes", "free sizes"])
def test_work_before_a_phase_stays_before_it(record: Make, dynamic: bool) -> None:
    """A mark that reads nothing comes behind kernels that are written late, too; sizes may be inputs."""
    from torch._inductor.utils import run_and_get_code

    recording = record(clock=HostClock(Ticks().now_ns))

    def body(rows: torch.Tensor) -> torch.Tensor:
        scaled = torch.nn.functional.layer_norm(rows, (32,))
        with recording.tracer.phase("expert_gemm", layer=3):
            return scaled @ torch.ones(32, 8)

    with torch.no_grad():
        run: Any = torch.compile(body, fullgraph=True, dynamic=dynamic, options={"fx_graph_cache": False})
        _, (code,) = run_and_get_code(run, torch.randn(4, 32))
    lines = [line.strip() for line in code.partition("def call(")[2].splitlines()]
    kernels = [at for at, line in enumerate(lines) if line.startswith("cpp_fused")]
    (begin,) = [
        at
        for at, line in enumerate(lines)
        if line.startswith(("moetrace_begin(", "torch.ops.moetrace.begin."))
    ]
    assert kernels[0] < begin


def test_sampling_does_not_compile_anything_again(record: Make) -> None:
    """Recorded steps, steps that are sampled out and calls outside of steps run the same graph."""
    recording = record(clock=HostClock(Ticks().now_ns), sample="1/3")
    model = Decoder()
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(torch.randn(6, 8))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for number in range(9):
        with recording.tracer.step(number):
            run(torch.randn(6, 8))
    run(torch.randn(6, 8))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert 0 < len(recording.records()) < 10


def test_one_graph_with_a_free_number_of_tokens_is_recorded_for_each(record: Make) -> None:
    """Dynamic shapes: marks and counts take what comes."""
    recording = record(clock=HostClock(Ticks().now_ns))
    model = Decoder()
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for tokens in (5, 9, 17):
        with torch.no_grad(), recording.tracer.step():
            run(torch.randn(tokens, 8))
    counted = [
        sum(sum(row.counts) for row in step.experts if row.kind is CountKind.ROUTED)
        for step in recording.records()
    ]
    assert counted == [20, 36, 68]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_what_was_traced_again_after_a_reset_is_recorded_again(record: Make) -> None:
    """torch._dynamo.reset() drops graphs; those made anew hold marks of the same sites."""
    recording = record(clock=HostClock(Ticks().now_ns))
    model = Decoder()
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with torch.no_grad(), recording.tracer.step():
            run(torch.randn(6, 8))
        torch._dynamo.reset()
    first, second = recording.records()
    assert [(row.layer, row.phase) for row in first.phases] == [
        (row.layer, row.phase) for row in second.phases
    ]
    assert {row.layer for row in first.phases if row.phase is Phase.ROUTER} == {0, 1}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_submodule_that_is_compiled_alone_is_recorded_with_the_rest(record: Make, when: str) -> None:
    """A compiled layer beside one that is not, whichever of compile and instrument came first."""
    recording = record(clock=HostClock(Ticks().now_ns))
    model = Decoder()
    if when == "before":
        model.layers[0].experts.compile(backend="aot_eager", fullgraph=True)
    recording.tracer.instrument(model)
    if when == "after":
        model.layers[0].experts.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad(), recording.tracer.step():
        model(torch.randn(6, 8))
    (step,) = recording.records()
    seen = [(row.layer, row.phase) for row in step.phases if row.phase in (Phase.ROUTER, Phase.FUSED)]
    assert seen == [(layer, phase) for layer in (0, 1) for phase in (Phase.ROUTER, Phase.FUSED)]
    assert [sum(row.counts) for row in step.experts if row.kind is CountKind.ROUTED] == [12, 12]


@NEEDS_COMPILER
def test_reduce_overhead_is_recorded_like_the_default(record: Make) -> None:
    """Without a device there are no graphs to capture: the same code, the same phases."""
    recording = record(clock=HostClock(Ticks().now_ns))
    model = Decoder()
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(2):
        with torch.no_grad(), recording.tracer.step():
            run(torch.randn(6, 8))
    step = recording.records()[1]
    seen = [(row.layer, row.phase) for row in step.phases if row.phase in (Phase.ROUTER, Phase.FUSED)]
    assert seen == [(layer, phase) for layer in (0, 1) for phase in (Phase.ROUTER, Phase.FUSED)]


@pytest.mark.parametrize(
    "name",
    [
        "compiler.is_exporting",
        "_C._AutoDispatchBelowAutograd",
        "_C._get_dispatch_mode",
        "_C._len_torch_dispatch_stack",
        "_C._TorchDispatchModeKey",
    ],
)
def test_a_torch_without_a_name_takes_no_marks(name: str) -> None:
    """Seen when torch is asked first, not in the middle of somebody's compilation."""
    owner, _, attribute = f"torch.{name}".rpartition(".")
    program = f"""
import torch
kept = {owner}.{attribute}
del {owner}.{attribute}
from moetrace.instrument import compiled
from moetrace.instrument.torch_state import TorchState
assert not compiled.AVAILABLE
assert TorchState().traced_step is None
# This torch needs it itself.
{owner}.{attribute} = kept
import moetrace
tracer = moetrace.init(endpoint="", run_id="r", rank=0, world_size=1)
part = tracer.wrap(experts=lambda rows: rows * 2, layer=0).experts
run = torch.compile(part, backend="eager", fullgraph=True)
with tracer.step():
    assert run(torch.ones(2)).tolist() == [2.0, 2.0]
assert tracer.guard.errors == {{}}
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["_C._autograd._get_sequence_nr", "_C._current_autograd_node"])
def test_a_torch_that_does_not_number_its_nodes_takes_marks_of_the_forward(name: str) -> None:
    """No backward in compiled graphs, and the rest as ever; a checkpoint around a block counts once."""
    owner, _, attribute = f"torch.{name}".rpartition(".")
    program = f"""
import torch
kept = {owner}.{attribute}
del {owner}.{attribute}
from moetrace.instrument import backward, compiled
assert compiled.AVAILABLE
# This torch needs it itself.
{owner}.{attribute} = kept
import moetrace
from moetrace.context import RankContext
from moetrace.config import Config
from moetrace.testing import MemoryEmitter
from moetrace.timing.clock import HostClock
from moetrace.tracer import Tracer
from compiled_models import Decoder, train
context = RankContext(
    run_id="r", rank=0, world_size=1, ep_rank=0, ep_size=1, ep_group=0, host_name="h"
)
emitter = MemoryEmitter()
tracer = Tracer(Config.load(dict(run_id="r", endpoint=""), {{}}), context, [emitter], HostClock())
model = Decoder()
tracer.instrument(model)
for layer in model.layers:
    layer.compile(backend="aot_eager", fullgraph=True)
def run(tokens):
    for layer in model.layers:
        tokens = tokens + torch.utils.checkpoint.checkpoint(layer, tokens, use_reentrant=False)
    return tokens
for _ in range(2):
    with tracer.step():
        train(run, model.layers.parameters())
assert tracer.guard.errors == {{}}, tracer.guard.errors
tracer.shutdown()
step = emitter.records[-1]
def seen(direction, flags):
    rows = [row for row in step.phases if row.direction == direction and bool(row.flags) is flags]
    return [(row.layer, str(row.phase)) for row in rows if row.phase in ("router", "fused")]
forward = [(layer, phase) for layer in (0, 1) for phase in ("router", "fused")]
assert seen("forward", False) == forward, step.phases
assert seen("backward", False) == [], step.phases
assert set(seen("backward", True)) == set(forward), step.phases
totals = {{str(row.kind): 0 for row in step.experts}}
for row in step.experts:
    totals[str(row.kind)] += sum(row.counts)
assert (totals["routed"], totals["recompute"]) == (24, 24), totals
"""
    folder = Path(sys.modules["compiled_models"].__file__ or "").parent
    path = os.pathsep.join((str(folder), *sys.path))
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": path})


def test_an_older_torch_says_by_its_older_name_what_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_compiling` is there since 2.1."""
    monkeypatch.delattr(torch.compiler, "is_dynamo_compiling")
    assert TorchState().compiling is torch.compiler.is_compiling


def test_a_phase_that_was_used_before_torch_came_is_traced() -> None:
    """Code that is compiled later holds its marks, with no graph break."""
    program = """
import sys
import moetrace
tracer = moetrace.init(endpoint="", run_id="r", rank=0, world_size=1)
for _ in range(2):
    with tracer.phase("dispatch", layer=0):
        pass
assert "torch" not in sys.modules
assert len(tracer.sites.sites) == 1
import torch
def body(rows):
    with tracer.phase("dispatch", layer=0):
        return rows * 2
with tracer.phase("dispatch", layer=0):
    pass
run = torch.compile(body, backend="eager", fullgraph=True)
with tracer.step():
    assert run(torch.ones(2)).tolist() == [2.0, 2.0]
assert len(tracer.sites.sites) == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def _waiting_states(monkeypatch: pytest.MonkeyPatch, learn: Callable[[Any], None]) -> list[Any]:
    """Three states as they are made before torch is there, which learn like this."""
    states: list[Any] = [object.__new__(TorchState) for _ in range(3)]
    monkeypatch.setattr(torch_state, "_waiting", list(states))
    monkeypatch.setattr(TorchState, "learn", learn)
    return states


def test_two_threads_that_see_torch_first_share_what_is_to_be_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One comes while the other is in the middle of it: each wrapper learns once, and neither fails."""
    learned: list[Any] = []
    errors: list[Exception] = []

    def go() -> None:
        try:
            torch_state.learn_torch()
        except Exception as error:  # noqa: BLE001 - asserted on below
            errors.append(error)

    def learn(state: Any) -> None:
        learned.append(state)
        if len(learned) == 1:
            other = threading.Thread(target=go)
            other.start()
            other.join()

    states = _waiting_states(monkeypatch, learn)
    go()
    assert errors == []
    assert learned == states[::-1]


def test_a_wrapper_that_could_not_learn_torch_learns_it_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What failed is tried again, with those that wait behind it."""
    tried: list[Any] = []

    def learn(state: Any) -> None:
        tried.append(state)
        if len(tried) == 1:
            raise RuntimeError("not now")

    states = _waiting_states(monkeypatch, learn)
    with pytest.raises(RuntimeError, match="not now"):
        torch_state.learn_torch()
    torch_state.learn_torch()
    assert tried == [states[-1], *states[::-1]]


class Pair(Decoder):
    """Calls another model first."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        torch._dynamo.graph_break()
        return super().forward(self.other[0](tokens))


class Failing(Decoder):
    """Fails in the middle of its forward when told so."""

    fails = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        hidden = super().forward(tokens)
        torch._dynamo.graph_break()
        if self.fails:
            raise ValueError("the model's own")
        return hidden


def test_a_compiled_model_that_calls_another_is_one_step(record: Make) -> None:
    """The inner one is a part of the step; each alone is a step, and none is dropped."""
    recording = record(clock=HostClock(Ticks().now_ns))
    inner = Decoder()
    compiled_inner: Any = torch.compile(inner, backend="eager")
    outer = Pair(compiled_inner)
    for model in (inner, outer):
        recording.tracer.instrument(model)
    run: Any = torch.compile(outer, backend="eager")
    with torch.no_grad():
        run(torch.randn(6, 8))
        compiled_inner(torch.randn(6, 8))
        run(torch.randn(6, 8))
    steps = recording.records()
    assert [{row.layer for row in step.phases} - {-1} for step in steps] == [
        {0, 1, 2, 3},
        {0, 1},
        {0, 1, 2, 3},
    ]
    assert not any(recording.tracer.metrics.dropped.values())
    assert recording.tracer.guard.errors == {}


def test_a_compiled_model_that_failed_is_a_step_again(record: Make) -> None:
    """What an exception left open is dropped; the next call is recorded as a whole."""
    recording, model = record(clock=HostClock(Ticks().now_ns)), Failing()
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        model.fails = True
        with pytest.raises(ValueError, match="the model's own"):
            run(torch.randn(6, 8))
        model.fails = False
        run(torch.randn(6, 8))
    (step,) = recording.records()
    assert {row.layer for row in step.phases} >= {0, 1}


@NEEDS_COMPILER
@pytest.mark.parametrize("broken", ["_keep_order", "_lowered"])
def test_a_fault_while_code_is_written_costs_the_order_alone(
    record: Make, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The op goes into the code like any other: same numbers, and the phases are there."""
    monkeypatch.setattr(graph_calls, broken, lambda *_: 1 / 0)
    recording, model = record(clock=HostClock(Ticks().now_ns)), Decoder()
    with torch.no_grad():
        rows = torch.randn(6, 8)
        plain = torch.compile(model, fullgraph=True)(rows)
        torch._dynamo.reset()
        recording.tracer.instrument(model)
        run: Any = torch.compile(model, fullgraph=True, options={"fx_graph_cache": False})
        with recording.tracer.step():
            assert torch.equal(run(rows), plain)
    (step,) = recording.records()
    assert {row.layer for row in step.phases if row.phase is Phase.ROUTER} == {0, 1}
    assert recording.tracer.guard.errors == {}
