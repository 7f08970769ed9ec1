"""Backward in compiled graphs: marks that are traced into them, by the rules of the eager hooks."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from compiled_models import Block, Decoder, Ticks, equal, needs_marks, train
from moetrace.instrument import graph_backward, graph_calls, graph_recompute
from moetrace.record.sites import Role
from moetrace.timing.clock import HostClock
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import CountKind, Direction, Phase

Make = Callable[..., Any]

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


pytestmark = [
    needs_marks,
    # Dynamo looks at the `grad` of a block's input, which is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Residual(nn.Module):
    """Blocks whose input is used beside them too: a node in between would change how gradients add up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers:
            tokens = tokens + layer(tokens) * tokens.sigmoid()
        return tokens


def phases(step: Any, direction: Direction) -> list[tuple[int, Phase]]:
    """Phases of a direction in order, without what lies between them."""
    return [
        (row.layer, row.phase)
        for row in step.phases
        if row.direction is direction and row.phase is not Phase.OUTSIDE
    ]


def recorded(record: Make, model: nn.Module, run: Any, **settings: Any) -> Any:
    """The second of two recorded training steps, its results, and the tracer."""
    recording = record(clock=HostClock(Ticks().now_ns), **settings)
    recording.tracer.instrument(model)
    for _ in range(2):
        with recording.tracer.step():
            results = train(run, model.parameters())
    assert recording.tracer.guard.errors == {}
    step = recording.records()[1]
    recording.tracer.uninstrument(model)
    return step, results


@pytest.mark.parametrize(
    ("backend", "make"),
    [
        ("aot_eager", Decoder),
        ("aot_eager", Residual),
        pytest.param("inductor", Residual, marks=NEEDS_COMPILER),
    ],
)
def test_backward_phases_are_those_of_the_eager_run(
    record: Make, backend: str, make: Callable[[], nn.Module]
) -> None:
    """The same phases in the same order, gradients bit for bit, and no graph break."""
    model = make()
    plain = train(torch.compile(model, backend=backend, fullgraph=True), model.parameters())
    eager, _ = recorded(record, model, model)
    torch._dynamo.reset()
    step, traced = recorded(record, model, torch.compile(model, backend=backend, fullgraph=True))
    assert equal(plain, traced)
    assert phases(step, Direction.BACKWARD) == phases(eager, Direction.BACKWARD)
    assert phases(step, Direction.BACKWARD) == [
        (layer, phase) for layer in (1, 0) for phase in (Phase.FUSED, Phase.ROUTER)
    ]
    assert phases(step, Direction.FORWARD) == phases(eager, Direction.FORWARD)


def test_nothing_more_is_kept_for_the_backward(record: Make) -> None:
    """What the forward graph hands to the backward graph is the same with marks and without."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compile_with(graphs: list[torch.fx.GraphModule], model: nn.Module) -> Any:
        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        run = torch.compile(model, backend=backend, fullgraph=True)
        train(run, model.parameters())
        return graphs

    model = Decoder()
    plain = compile_with([], model)
    torch._dynamo.reset()
    recording = record(clock=HostClock(Ticks().now_ns))
    recording.tracer.instrument(model)
    marked = compile_with([], model)

    def kept(forward: torch.fx.GraphModule) -> list[Any]:
        """Shapes of what the forward gives back beside its token."""
        (given,) = next(node for node in forward.graph.nodes if node.op == "output").args
        tensors = [node.meta["val"] for node in given if node is not None]
        return sorted(str(tuple(t.shape)) for t in tensors if t.numel())

    assert kept(plain[0]) == kept(marked[0])
    assert "backward_begin" in str(marked[1].graph)
    assert "backward_begin" not in str(marked[0].graph)
    assert "moetrace" not in str(plain[1].graph)


@pytest.mark.parametrize("settings", [{"backward": False}, {}], ids=["switched off", "no gradients"])
def test_where_no_backward_is_wanted_its_graph_is_the_models_own(
    record: Make, settings: dict[str, Any]
) -> None:
    """backward=False, and a run without gradients, leave marks in the forward only."""
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        graphs.append(str(graph.graph))
        return make_boxed_func(graph.forward)

    from torch._dynamo.backends.common import aot_autograd

    model = Decoder()
    recording = record(clock=HostClock(Ticks().now_ns), **settings)
    recording.tracer.instrument(model)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, inference_compiler=keep)
    run: Any = torch.compile(model, backend=backend, fullgraph=True)
    with recording.tracer.step():
        if settings:
            train(run, model.parameters())
        else:
            with torch.no_grad():
                run(torch.randn(6, 8))
    (step,) = recording.records()
    assert phases(step, Direction.BACKWARD) == []
    assert phases(step, Direction.FORWARD)
    assert len(graphs) == (2 if settings else 1)
    assert not any("moetrace.backward_" in graph for graph in graphs)


def test_blocks_that_are_compiled_one_by_one_show_the_same_backward(record: Make) -> None:
    """Each block is a graph of its own, as training frameworks compile; its input is the graph's input."""
    model = Decoder()
    eager, _ = recorded(record, model, model)
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    step, _ = recorded(record, model, model)
    assert phases(step, Direction.BACKWARD) == phases(eager, Direction.BACKWARD)


def test_accumulated_microbatches_each_have_their_backward(record: Make) -> None:
    """Two backward passes of one graph in a step are two passes through every layer."""
    model = Decoder()
    recording = record(clock=HostClock(Ticks().now_ns))
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(run, model.parameters())
    with recording.tracer.step():
        for _ in range(2):
            run(torch.randn(6, 8)).square().sum().backward()
    step = recording.records()[-1]
    once = [(layer, phase) for layer in (1, 0) for phase in (Phase.FUSED, Phase.ROUTER)]
    assert phases(step, Direction.BACKWARD) == once * 2


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
def test_a_backward_in_a_later_step_is_none_of_that_step(record: Make, compile_it: bool) -> None:
    """Its own step has ended, and the later one shows the backward of its own forward alone."""
    model = Decoder()
    recording = record(clock=HostClock(Ticks().now_ns))
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
    train(run, model.parameters())
    with recording.tracer.step():
        early, late = (run(torch.randn(6, 8)).square().sum() for _ in range(2))
        early.backward()
    with recording.tracer.step():
        own = run(torch.randn(6, 8)).square().sum()
        late.backward()
        own.backward()
    with recording.tracer.step():
        forgotten = run(torch.randn(6, 8)).square().sum()
    with recording.tracer.step():
        forgotten.backward()
    once = [(layer, phase) for layer in (1, 0) for phase in (Phase.FUSED, Phase.ROUTER)]
    shown = [phases(step, Direction.BACKWARD) for step in recording.records()[-4:]]
    assert shown == [once, once, [], []]
    assert recording.tracer.guard.errors == {}


def test_a_forward_on_another_thread_has_its_backward_in_the_step(record: Make) -> None:
    """Threads number their autograd nodes apart: a young thread's have lower numbers than the step's."""
    model = Decoder()
    recording = record(clock=HostClock(Ticks().now_ns))
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        train(run, model.parameters())
    losses: list[torch.Tensor] = []
    with recording.tracer.step():
        thread = threading.Thread(target=lambda: losses.append(run(torch.randn(6, 8)).square().sum()))
        thread.start()
        thread.join()
        losses[0].backward()
    step = recording.records()[-1]
    assert phases(step, Direction.BACKWARD) == [
        (layer, phase) for layer in (1, 0) for phase in (Phase.FUSED, Phase.ROUTER)
    ]


@pytest.mark.parametrize("other_thread", [False, True], ids=["own thread", "another thread"])
def test_a_forward_without_gradients_takes_no_older_backward_into_its_step(
    record: Make, other_thread: bool
) -> None:
    """A graph that makes no autograd node: the last one that was made is that of an earlier step's graph."""
    model = Decoder()
    recording = record(clock=HostClock(Ticks().now_ns))
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True)

    def infer() -> None:
        with torch.no_grad():
            run(torch.randn(6, 8))

    infer()
    for _ in range(3):
        train(run, model.parameters())
    with ThreadPoolExecutor(1) as pool:

        def call(function: Any, *args: Any) -> Any:
            return pool.submit(function, *args).result() if other_thread else function(*args)

        with recording.tracer.step():
            output = call(run, torch.randn(6, 8, requires_grad=True))
        with recording.tracer.step():
            call(infer)
            output.backward(torch.ones_like(output))
        with recording.tracer.step():
            output = call(run, torch.randn(6, 8, requires_grad=True))
            call(infer)
            output.backward(torch.ones_like(output))
    once = [(layer, phase) for layer in (1, 0) for phase in (Phase.FUSED, Phase.ROUTER)]
    shown = [phases(step, Direction.BACKWARD) for step in recording.records()[-3:]]
    assert shown == [[], [], once]
    assert recording.tracer.guard.errors == {}


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_a_checkpoint_around_a_compiled_block_is_recompute_and_counted_once(
    record: Make, reentrant: bool
) -> None:
    """The graph runs again inside backward: its phases carry the flag, its pairs are not load."""
    model = Decoder()
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            tokens = tokens + torch.utils.checkpoint.checkpoint(
                layer, model.norm(tokens), use_reentrant=reentrant
            )
        return tokens

    step, _ = recorded(record, model, run)
    again = [row for row in step.phases if row.flags & RowFlag.RECOMPUTE and row.phase is not Phase.OUTSIDE]
    assert {row.layer for row in again} == {0, 1}
    assert {row.direction for row in again} == {Direction.BACKWARD}
    totals = {kind: sum(sum(row.counts) for row in step.experts if row.kind is kind) for kind in CountKind}
    assert (totals[CountKind.ROUTED], totals[CountKind.RECOMPUTE]) == (24, 24)
    first = [row for row in step.phases if row.direction is Direction.BACKWARD and not row.flags]
    assert {(row.layer, row.phase) for row in first} >= {(0, Phase.ROUTER), (1, Phase.ROUTER)}


class Checkpointed(Decoder):
    """Each block, with the norm in front of it, is recomputed in the backward."""

    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers:
            tokens = tokens + torch.utils.checkpoint.checkpoint(
                lambda rows, layer=layer: layer(self.norm(rows)), tokens, use_reentrant=self.reentrant
            )
        return tokens


def recomputed(step: Any) -> set[tuple[int, Phase]]:
    """Layers and phases of activation recompute."""
    rows = [row for row in step.phases if row.flags & RowFlag.RECOMPUTE]
    return {(row.layer, row.phase) for row in rows if row.phase is not Phase.OUTSIDE}


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)])
def test_a_checkpoint_inside_a_compiled_region_is_recompute_and_counted_once(
    record: Make, backend: str, reentrant: bool
) -> None:
    """As in the eager run: the flag, the pairs apart, gradients bit for bit, and no graph break."""
    model = Checkpointed()
    model.reentrant = reentrant
    plain = train(torch.compile(model, backend=backend, fullgraph=True), model.parameters())
    eager, _ = recorded(record, model, model)
    torch._dynamo.reset()
    step, traced = recorded(record, model, torch.compile(model, backend=backend, fullgraph=True))
    assert equal(plain, traced)
    for run in (eager, step):
        assert recomputed(run) == {(layer, part) for layer in (0, 1) for part in (Phase.ROUTER, Phase.FUSED)}
        assert {row.direction for row in run.phases if row.flags & RowFlag.RECOMPUTE} == {Direction.BACKWARD}
        totals = {kind: sum(sum(row.counts) for row in run.experts if row.kind is kind) for kind in CountKind}
        assert (totals[CountKind.ROUTED], totals[CountKind.RECOMPUTE]) == (24, 24)
    assert phases(step, Direction.FORWARD) == phases(eager, Direction.FORWARD)
    own = [row for row in step.phases if row.direction is Direction.BACKWARD and not row.flags]
    assert {(row.layer, row.phase) for row in own} >= {(0, Phase.ROUTER), (1, Phase.ROUTER)}


def test_what_is_recomputed_in_a_compiled_graph_lies_between_its_marks(record: Make) -> None:
    """Products and sorts of the forward, and none of the backward; an end has read what came before it."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    model = Checkpointed()
    recording = record(clock=HostClock(Ticks().now_ns))
    recording.tracer.instrument(model)
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    train(torch.compile(model, backend=backend, fullgraph=True), model.parameters())
    forward, backward = graphs
    sites = recording.tracer.sites.sites
    opened: list[int] = []
    inside: dict[str, int] = {}
    for node in backward.graph.nodes:
        assert node.op == "output" or "val" in node.meta
        if node.target is torch.ops.moetrace.recompute_begin.default:
            opened.append(node.args[-1])
        elif node.target is torch.ops.moetrace.recompute_end.default:
            assert opened.pop() == node.args[-1]
        elif opened:
            inside[node.name] = opened[-1]
    assert opened == []
    products = {"aten.mm.default", "aten.bmm.default", "aten.topk.default"}
    of_forward = {node.name for node in forward.graph.nodes if str(node.target) in products}
    of_backward = {node.name for node in backward.graph.nodes if str(node.target) in products}
    assert of_forward & of_backward == {
        node.name for node in backward.graph.nodes if node.name in inside and str(node.target) in products
    }
    assert {sites[inside[name]].phase for name in of_forward & of_backward if "topk" in name} == {
        Phase.ROUTER
    }
    assert {sites[inside[name]].role for name in of_forward & of_backward if "bmm" in name} == {Role.EXPERTS}


@NEEDS_COMPILER
def test_every_mark_of_recompute_is_in_order_in_a_graph_with_free_sizes_too(
    record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second number of tokens makes sizes inputs of the graph: they have no device."""
    lowered: list[str] = []
    ordered: list[str] = []
    lower, keep_order = graph_calls._lowered, graph_calls._keep_order

    def note_lowered(op: Any, args: Any) -> Any:
        lowered.append(str(op))
        return lower(op, args)

    def note_ordered(graph: Any) -> None:
        keep_order(graph)
        ordered.append(lowered[-1])

    monkeypatch.setattr(graph_calls, "_lowered", note_lowered)
    monkeypatch.setattr(graph_calls, "_keep_order", note_ordered)
    model = Checkpointed()
    recording = record(clock=HostClock(Ticks().now_ns))
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, fullgraph=True, options={"fx_graph_cache": False})
    for tokens in (6, 9):
        run(torch.randn(tokens, 8, requires_grad=True)).square().sum().backward()
    assert lowered.count("moetrace.recompute_begin.default") > 4
    assert ordered == lowered


@pytest.mark.parametrize("comes_first", [True, False])
def test_pairs_are_counted_again_where_their_number_is_known_by_then(comes_first: bool) -> None:
    """A size that the graph makes later cannot be read: no count then, and the graph is valid."""
    graph = torch.fx.Graph()
    mask = graph.placeholder("mask")
    size = torch.ops.aten.sym_size.int
    if comes_first:
        pairs = graph.call_function(size, (mask, 0))
    counted = graph.call_function(torch.ops.aten.relu.default, (mask,))
    if not comes_first:
        pairs = graph.call_function(size, (mask, 0))
    graph.output((counted, pairs))
    counted.meta |= {
        graph_recompute.CALLS: ((1, 0),),
        graph_recompute.COUNTS: (("count_mask", 1, 0, (pairs.name,)),),
        "recompute": True,
    }
    graph_recompute.mark_recompute(torch.fx.GraphModule({}, graph))
    graph.lint()
    counts = [node for node in graph.nodes if node.target is torch.ops.moetrace.count_mask.default]
    assert [node.args for node in counts] == ([(counted, 1, 0, pairs)] if comes_first else [])


@pytest.mark.parametrize("broken", ["label_calls", "_mark_stretch", "_count_again"])
def test_a_fault_while_recompute_is_marked_costs_marks_alone(
    record: Make, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """It is counted; outputs and gradients are those of the plain graph."""
    model = Checkpointed()
    plain = train(torch.compile(model, backend="aot_eager", fullgraph=True), model.parameters())
    torch._dynamo.reset()
    module = graph_backward if broken == "label_calls" else graph_recompute
    monkeypatch.setattr(module, broken, lambda *_: 1 / 0)
    recording = record(clock=HostClock(Ticks().now_ns))
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    with recording.tracer.step():
        assert equal(plain, train(run, model.parameters()))
    assert recording.tracer.guard.errors["compiled_backward"] > 0


def test_a_checkpoint_whose_backward_runs_in_a_later_step_is_none_of_that_step(record: Make) -> None:
    """Neither its time nor its pairs."""
    model = Checkpointed()
    recording = record(clock=HostClock(Ticks().now_ns))
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(run, model.parameters())
    with recording.tracer.step():
        loss = run(torch.randn(6, 8)).square().sum()
    with recording.tracer.step():
        loss.backward()
    step = recording.records()[-1]
    assert {row.phase for row in step.phases} == {Phase.OUTSIDE}
    assert step.experts == ()


def test_a_backward_that_nothing_ends_ends_with_the_pass(record: Make) -> None:
    """Calls whose input needs no gradient: their backward lasts until the pass is over, and not longer."""
    recording = record(clock=HostClock(Ticks().now_ns))
    weight = nn.Parameter(torch.randn(8, 8))
    parts = recording.tracer.wrap(layer=0, experts=lambda rows: rows @ weight)
    run = torch.compile(lambda rows: parts.experts(rows).square().sum(), backend="aot_eager", fullgraph=True)
    tokens = torch.randn(4, 8)
    run(tokens).backward()
    with recording.tracer.step():
        run(tokens).backward()
        torch.randn(3, requires_grad=True).sum().backward()
    step = recording.records()[-1]
    assert phases(step, Direction.BACKWARD) == [(0, Phase.EXPERT_GEMM)]
    assert recording.tracer.guard.errors == {}


class Halves(nn.Module):
    """Experts whose result is two parts of one node."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Both halves."""
        return (tokens * 2).split(2)


def _halves(record: Make) -> tuple[Any, Any, list[float]]:
    """A recorded step of compiled code that uses the second half alone; gradient of its input."""
    recording, experts = record(clock=HostClock(Ticks().now_ns)), Halves()
    recording.tracer.wrap(experts=experts, layer=0)
    run = torch.compile(lambda tokens: experts(tokens)[1] * 3, backend="aot_eager", fullgraph=True)
    tokens = torch.ones(4, requires_grad=True)
    with recording.tracer.step():
        run(tokens).sum().backward()
    assert tokens.grad is not None
    return recording.records()[0], recording.tracer, tokens.grad.tolist()


def test_an_output_without_a_gradient_is_no_fault(record: Make) -> None:
    """Torch hands a hook None where another output of the same node is the one that is used."""
    step, tracer, gradient = _halves(record)
    assert gradient == [0.0, 0.0, 6.0, 6.0]
    assert tracer.guard.errors == {}
    assert phases(step, Direction.BACKWARD) == [(0, Phase.EXPERT_GEMM)]


@pytest.mark.parametrize("broken", ["_watch", "_close", "_trace"])
def test_a_fault_of_ours_costs_marks_and_not_the_graph(
    record: Make, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """It is counted; outputs and gradients are there."""
    monkeypatch.setattr(graph_backward.BackwardTracing, broken, lambda *_: 1 / 0)
    _, tracer, gradient = _halves(record)
    assert gradient == [0.0, 0.0, 6.0, 6.0]
    assert tracer.guard.errors["compiled_backward"] > 0
