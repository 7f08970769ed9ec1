"""The CUDA clock on a real device: no sync on the model's thread, and times that are right."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from moetrace.adapters.reference import ReferenceMoE
from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.testing import MemoryEmitter
from moetrace.timing.cuda_events import CudaClock
from moetrace.tracer import Tracer
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Phase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Any operation that waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def busy(cycles: int) -> None:
    """Keeps the device busy without the host."""
    torch.cuda._sleep(cycles)


def test_marks_resolve_to_the_device_time_between_them() -> None:
    """Twice the work takes twice the time, and a pair without work between almost none."""
    track = CudaClock().track(8)
    busy(1_000_000)
    track.mark()
    busy(20_000_000)
    track.mark()
    busy(40_000_000)
    track.mark()
    track.mark()
    torch.cuda.synchronize()
    assert track.ready()
    first, second, third, fourth = (track.nanoseconds(mark) for mark in range(4))
    assert first == 0
    assert (third - second) / second == pytest.approx(2, rel=0.1)
    assert fourth - third < 100_000


def test_a_step_is_recorded_without_any_sync(no_sync: None) -> None:
    """Wrappers, counters and the end of a step never wait for the device."""
    emitter = MemoryEmitter()
    context = RankContext(
        run_id="gpu", rank=0, world_size=1, ep_rank=0, ep_size=1, ep_group=0, host_name="host"
    )
    tracer = Tracer(Config.load({"endpoint": "", "max_intervals": 64}, {}), context, [emitter])
    gate = torch.nn.Linear(64, 8, device="cuda")
    hidden = torch.randn(128, 64, device="cuda")
    wrapped = tracer.wrap(
        router=lambda x: gate(x).softmax(-1).topk(2),
        experts=torch.nn.Linear(64, 64, device="cuda"),
        layer=0,
        num_experts=8,
    )
    busy(200_000_000)
    with tracer.step():
        wrapped.router(hidden)
        wrapped.experts(hidden)
    torch.cuda.set_sync_debug_mode("default")
    (step,) = emitter.wait_for(1, timeout_s=30)
    tracer.shutdown()
    assert step.clock == "cuda"
    assert sum(row.duration_ns for row in step.phases) == step.duration_ns
    assert [sum(row.counts) for row in step.experts] == [256]
    assert tracer.guard.errors == {}


def test_a_mark_inside_a_graph_capture_gives_no_stamp_and_the_graph_replays() -> None:
    """Capture is left alone: the graph works, and the step around it survives."""
    track = CudaClock().track(8)
    x = torch.ones(16, device="cuda")
    torch.cuda.synchronize()
    track.mark()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert track.mark() == -1
        y = x * 2
    graph.replay()
    assert track.mark() == 1
    torch.cuda.synchronize()
    assert torch.equal(y, x * 2)
    assert track.nanoseconds(1) > 0


def test_outputs_and_gradients_are_bit_identical_on_the_device() -> None:
    """Tracing changes nothing that the device computes."""
    torch.manual_seed(0)
    layer = ReferenceMoE(32, 64, num_experts=4, top_k=2).to("cuda")
    hidden = torch.randn(64, 32, device="cuda", requires_grad=True)

    def run() -> list[torch.Tensor]:
        layer.zero_grad()
        hidden.grad = None
        result = layer(hidden)
        result.square().sum().backward()
        assert hidden.grad is not None
        return [result.detach(), hidden.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    plain = run()
    emitter = MemoryEmitter()
    context = RankContext(
        run_id="gpu", rank=0, world_size=1, ep_rank=0, ep_size=1, ep_group=0, host_name="host"
    )
    tracer = Tracer(Config.load({"endpoint": "", "max_intervals": 64}, {}), context, [emitter])
    tracer.instrument(layer)
    traced = run()
    tracer.shutdown()
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def tracer_on_cuda() -> tuple[Tracer, MemoryEmitter]:
    """A tracer with device events."""
    emitter = MemoryEmitter()
    context = RankContext(
        run_id="gpu", rank=0, world_size=1, ep_rank=0, ep_size=1, ep_group=0, host_name="host"
    )
    settings = {"endpoint": "", "max_intervals": 64, "clock": "cuda"}
    return Tracer(Config.load(settings, {}), context, [emitter]), emitter


def test_calls_inside_a_replay_are_told_apart_and_counted() -> None:
    """External events captured with the work are recorded by each replay; counts are those of the replay."""
    tracer, emitter = tracer_on_cuda()
    gate = torch.nn.Linear(64, 8, device="cuda")
    inner = torch.nn.Linear(64, 64, device="cuda")
    hidden = torch.randn(128, 64, device="cuda")
    parts = tracer.wrap(router=lambda x: gate(x).softmax(-1).topk(2), experts=inner, layer=0, num_experts=8)

    def run() -> torch.Tensor:
        weights, _ = parts.router(hidden)
        result: torch.Tensor = parts.experts(hidden) * weights.sum(-1, keepdim=True)
        return result

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        expected = run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = run()
    for count in (1, 2):
        with tracer.step():
            graph.replay()
        torch.cuda.synchronize()
        step = emitter.wait_for(count, timeout_s=30)[-1]
        rows = {row.phase: row for row in step.phases if row.flags & RowFlag.CAPTURED}
        assert rows[Phase.EXPERT_GEMM].duration_ns > 0
        assert [sum(row.counts) for row in step.experts] == [256]
    assert torch.equal(output, expected)
    assert tracer.metrics.skipped == {}
    tracer.shutdown()
    assert tracer.guard.errors == {}


def test_a_call_on_another_stream_lies_beside_the_steps_own() -> None:
    """Its row carries the stream, and its time is the work's."""
    tracer, emitter = tracer_on_cuda()
    side = torch.cuda.Stream()

    def shared() -> None:
        with torch.cuda.stream(side):
            parts_on_side.shared_expert()

    parts_on_side = tracer.wrap(shared_expert=lambda: busy(20_000_000), layer=0)
    parts = tracer.wrap(experts=lambda: busy(40_000_000), layer=0)
    with tracer.step():
        shared()
        parts.experts()
    torch.cuda.synchronize()
    (step,) = emitter.wait_for(1, timeout_s=30)
    tracer.shutdown()
    streams = {row.phase: row.stream for row in step.phases}
    assert (streams[Phase.SHARED_EXPERT], streams[Phase.EXPERT_GEMM]) == (1, 0)


def test_a_step_is_placed_in_unix_time_within_its_error() -> None:
    """The device's start lies between the host's looks, give or take what the anchor says."""
    tracer, emitter = tracer_on_cuda()
    torch.cuda.synchronize()
    before = time.time_ns()
    with tracer.step():
        busy(1_000_000)
    torch.cuda.synchronize()
    after = time.time_ns()
    (step,) = emitter.wait_for(1, timeout_s=30)
    tracer.shutdown()
    assert 0 <= step.anchor_error_ns < 1_000_000
    assert before - step.anchor_error_ns <= step.start_unix_ns <= after + step.anchor_error_ns
