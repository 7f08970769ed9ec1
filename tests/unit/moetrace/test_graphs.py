"""CUDA graphs on a fake device that keeps a real one's rules: captured marks, and replays."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moetrace.instrument.coverage import CoverageReport
from moetrace.instrument.wrap import timed
from moetrace.record.buffer import TICKET_SHIFT
from moetrace.record.replays import EMPTY_EVENTS, CapturedGraph, Replay, replayed_calls, without_events
from moetrace.record.sites import Role, Site
from moetrace.testing import FakeDevice, FakeGraph, FakeTime
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import CountKind, Phase, SkipReason

from . import deep_ep_package as deep_ep
from .intervals import lines

Make = Callable[..., Any]


@pytest.fixture
def device() -> FakeDevice:
    """A fake device with graphs."""
    device = FakeDevice()
    device.graph_class = type("Graph", (FakeGraph,), {name: vars(FakeGraph)[name] for name in METHODS})
    return device


METHODS = ("capture_begin", "capture_end", "replay")


class Layer:
    """A router and experts that take device time."""

    def __init__(self, recording: Any, device: FakeDevice) -> None:
        self.device = device
        self.parts = recording.tracer.wrap(
            router=self.router, experts=self.experts, combine=self.combine, layer=0, num_experts=4
        )

    def router(self, ids: torch.Tensor) -> torch.Tensor:
        """1 us."""
        self.device.work(1_000)
        return ids

    def experts(self) -> None:
        """5 us."""
        self.device.work(5_000)

    def combine(self) -> None:
        """2 us."""
        self.device.work(2_000)

    def run(self) -> None:
        """One pass."""
        self.parts.router(torch.tensor([[0, 1], [1, 2]]))
        self.parts.experts()
        self.parts.combine()

    def capture(self) -> FakeGraph:
        """One pass, captured."""
        graph: FakeGraph = self.device.graph_class(self.device)
        graph.capture_begin()
        self.run()
        graph.capture_end()
        return graph


def finish_step(recording: Any, device: FakeDevice, count: int) -> Any:
    """The record of the last step."""
    device.finish()
    return recording.emitter.wait_for(count)[-1]


PASS = [
    "0 router 1000-2000 captured",
    "0 expert_gemm 2000-7000 captured",
    "0 combine 7000-9000 barrier captured",
]


def test_calls_inside_a_replay_are_told_apart(record: Make, device: FakeDevice) -> None:
    """Marks are captured with the work; a replay inside a step shows every call, flagged as captured."""
    recording = record(clock=device.clock())
    layer = Layer(recording, device)
    graph = layer.capture()
    for number in (1, 2):
        with recording.tracer.step():
            device.work(1_000)
            graph.replay()
            device.work(500)
        step = finish_step(recording, device, number)
        assert lines(step.phases) == ["0 outside 0-1000", *PASS, "-1 outside 9000-9500"]
    assert recording.tracer.metrics.skipped == {}
    assert recording.tracer.guard.errors == {}
    assert device.syncs == 0


def test_a_replay_that_was_overwritten_is_one_row_that_cannot_be_told_apart(
    record: Make, device: FakeDevice
) -> None:
    """The next launch records the graph's events again: no time of it is passed off as this step's."""
    recording = record(clock=device.clock())
    layer = Layer(recording, device)
    graph = layer.capture()
    with recording.tracer.step():
        graph.replay()
    graph.replay()
    step = finish_step(recording, device, 1)
    assert lines(step.phases) == ["-1 fused 0-8000 captured"]
    assert recording.tracer.metrics.skipped == {SkipReason.CUDA_GRAPH: 1}


def test_a_graph_captured_without_marks_says_so(record: Make, device: FakeDevice) -> None:
    """Captured before instrumenting, or on a device whose graphs take no events: one row, one count."""
    graph = device.graph_class(device)
    graph.capture_begin()
    device.work(4_000)
    graph.capture_end()
    device.graph_events = False
    recording = record(clock=device.clock())
    layer = Layer(recording, device)
    later = layer.capture()
    with recording.tracer.step():
        graph.replay()
        device.work(10)
        later.replay()
    step = finish_step(recording, device, 1)
    assert lines(step.phases) == [
        "-1 fused 0-4000 captured",
        "-1 outside 4000-4010",
        "-1 fused 4010-12010 captured",
    ]
    assert recording.tracer.metrics.skipped == {SkipReason.CUDA_GRAPH: 2}
    assert step.experts == ()


def test_counts_of_a_replay_are_those_of_its_step_only(record: Make, device: FakeDevice) -> None:
    """The graph counts into its own counter; replays outside of sampled steps do not add up in it."""
    recording = record(clock=device.clock())
    layer = Layer(recording, device)
    ids = torch.tensor([[0, 1], [1, 2]])
    graph = layer.capture()
    captured = next(iter(graph_marks(recording)._graphs.values()))

    captured.counter.zero()
    graph.device.replay = lambda items: captured.counter.add(0, ids)  # type: ignore[method-assign]
    graph.replay()
    with recording.tracer.step():
        graph.replay()
        graph.replay()
    step = finish_step(recording, device, 1)
    (row,) = [row for row in step.experts if row.kind is CountKind.ROUTED]
    assert row.counts == (2, 4, 2, 0)


def test_rows_received_in_a_replay_are_counted(
    record: Make, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The add is captured behind the hook that receives; numbers of another rank's experts stay zero; kinds
    of a layer that a graph counted are not held against each other.
    """
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep.package(deep_ep.Buffer))
    recording = record(clock=device.clock())
    layer = Layer(recording, device)
    arriving = deep_ep.Arriving([[0, -1], [1, 1]], 2, 1, 2)
    buffer = deep_ep.Buffer(FakeTime(), arriving)
    ids = torch.tensor([[0, 1], [1, 2]])
    graph: FakeGraph = device.graph_class(device)
    graph.capture_begin()
    layer.parts.router(ids)
    *_, hook = buffer.low_latency_dispatch(torch.ones(2, 2), ids, 8, 4, return_recv_hook=True)
    captured = recording.tracer.buffer.counter
    (index,) = captured.at_exchange.values()
    assert captured._rows[index].tolist() == [0] * len(captured._rows[index])
    assert hook is not None
    hook()
    layer.parts.experts()
    graph.capture_end()
    assert captured._rows[index][1:5].tolist() == [0, 0, 1, 2]

    def replay(items: Any) -> None:
        captured.add(0, ids)
        captured.add_local_counts(index, arriving.counts, arriving.rank)

    captured.zero()
    graph.device.replay = replay  # type: ignore[method-assign]
    graph.replay()
    with recording.tracer.step():
        graph.replay()
        graph.replay()
    step = finish_step(recording, device, 1)
    counts = {row.kind: row.counts for row in step.experts}
    assert counts == {CountKind.ROUTED: (2, 4, 2, 0), CountKind.RECEIVED: (0, 0, 2, 4)}
    assert step.violations == ()
    assert recording.tracer.guard.errors == {}


def graph_marks(recording: Any) -> Any:
    """The tracer's side of captures."""
    (patch, *_) = recording.tracer._buffers.graph_patches._patches
    return patch.replacement.__closure__[1].cell_contents.__self__


def test_a_forward_that_is_captured_is_no_step_and_the_open_step_is_a_warm_up(
    record: Make, device: FakeDevice
) -> None:
    """Capture inside a step: the step goes on behind it, marked, without what only was captured."""
    recording = record(clock=device.clock())
    layer = Layer(recording, device)
    with recording.tracer.step():
        layer.run()
        graph = device.graph_class(device)
        graph.capture_begin()
        with recording.tracer.step():
            layer.run()
        graph.capture_end()
        layer.parts.experts()
    step = finish_step(recording, device, 1)
    assert step.warmup
    assert [line for line in lines(step.phases) if "captured" in line] == []
    assert sum(row.duration_ns for row in step.phases) == 13_000
    assert recording.tracer.metrics.dropped_intervals == 0


def test_the_drain_thread_asks_nothing_while_a_graph_is_captured(record: Make, device: FakeDevice) -> None:
    """A query would break the capture: the step waits, and is whole afterwards."""
    recording = record(clock=device.clock())
    layer = Layer(recording, device)
    graph = device.graph_class(device)
    graph.capture_begin()
    asked: list[bool] = []
    refuse = device.refuse_in_capture
    device.refuse_in_capture = lambda: (asked.append(device.capturing), refuse())[1]  # type: ignore[func-returns-value,method-assign]
    clock = recording.tracer._buffers.clock
    assert clock.gate.run(lambda: 1) is None
    track = clock.track(2)
    assert not track.ready()
    assert track.resolve(lambda: 1) is None
    assert asked == []
    graph.capture_end()
    with recording.tracer.step():
        layer.run()
    assert len(finish_step(recording, device, 1).phases) == 3
    assert not any(asked)


def test_a_capture_that_fails_passes_its_error_on_and_leaves_the_gate_open(
    record: Make, device: FakeDevice
) -> None:
    """The model's exception is the model's; what follows is recorded as ever."""

    def broken(self: Any) -> None:
        raise RuntimeError("no memory")

    device.graph_class.capture_begin = broken
    recording = record(clock=device.clock())
    layer = Layer(recording, device)
    with pytest.raises(RuntimeError, match="no memory"):
        device.graph_class(device).capture_begin()
    with recording.tracer.step():
        layer.run()
    assert len(finish_step(recording, device, 1).phases) == 3


def test_after_shutdown_the_graph_class_is_its_own_again(record: Make, device: FakeDevice) -> None:
    """The very same functions are back, and graphs with marks replay on."""
    before = {name: getattr(device.graph_class, name) for name in METHODS}
    recording = record(clock=device.clock())
    layer = Layer(recording, device)
    graph = layer.capture()
    assert any(getattr(device.graph_class, name) is not before[name] for name in METHODS)
    recording.tracer.shutdown()
    assert {name: getattr(device.graph_class, name) for name in METHODS} == before
    graph.replay()
    assert device.enqueued_ns == 8_000


def test_streams_and_exchanges_in_flight_of_a_graph_are_its_own(record: Make, device: FakeDevice) -> None:
    """A captured side stream lies beside; launch and wait of each replay find each other, not another's."""
    recording = record(clock=device.clock())
    parts = recording.tracer.wrap(
        experts=lambda: device.work(5_000), shared_expert=lambda: device.work(1_000), layer=0
    )
    tracer = recording.tracer
    launch = tracer.sites.add(Site(Role.EXCHANGE))
    wait = tracer.sites.add(Site(Role.WAIT))
    graph = device.graph_class(device)
    graph.capture_begin()
    with tracer.phase("dispatch", layer=0):
        buffer = tracer.buffer
        buffer.add(launch, buffer.mark(), buffer.mark(), RowFlag.ASYNC | buffer.launch(7) << TICKET_SHIFT)
        start = buffer.mark()
        device.work(3_000)
        buffer.add(wait, start, buffer.mark(), buffer.landed((7,), guess=False) << TICKET_SHIFT)
    device.current_stream = 8
    parts.shared_expert()
    device.current_stream = 7
    parts.experts()
    graph.capture_end()
    other = device.graph_class(device)
    other.capture_begin()
    parts.experts()
    other.capture_end()
    with tracer.step():
        other.replay()
        graph.replay()
    step = finish_step(recording, device, 1)
    named = [(row.stream, line) for row, line in zip(step.phases, lines(step.phases), strict=True)]
    assert (0, "0 dispatch 5000-8000 barrier captured async") in named
    assert (1, "0 shared_expert 8000-9000 captured") in named
    calls = replayed_calls(
        [
            Replay(graph=captured, site=0, number=0, start_mark=0, end_mark=0)
            for captured in [
                CapturedGraph(
                    marks=[(launch, 0, 0, RowFlag.ASYNC | 1 << TICKET_SHIFT)], events=[None], streams=[7]
                )
            ]
            * 2
        ],
        SimpleNamespace(until=lambda event: 0),  # type: ignore[arg-type]
        Counter(),
    )
    assert len({flags >> TICKET_SHIFT for *_, flags in calls}) == 2


def test_the_time_of_empty_event_pairs_is_taken_off_captured_calls(record: Make, device: FakeDevice) -> None:
    """Measured by events of the graph itself: calls last what they last without events, without gaps."""
    device.graph_event_ns = 700
    recording = record(clock=device.clock())
    layer = Layer(recording, device)
    graph = layer.capture()
    with recording.tracer.step():
        device.work(1_000)
        graph.replay()
    step = finish_step(recording, device, 1)
    spent = (6 + EMPTY_EVENTS) * 700
    assert lines(step.phases) == ["0 outside 0-1000", *PASS, f"-1 outside 9000-{9000 + spent}"]


def test_only_the_first_of_many_small_graphs_measures_empty_pairs(record: Make, device: FakeDevice) -> None:
    """Graphs of a few events would grow by as much again; they take what the first one found."""
    device.graph_event_ns = 700
    recording = record(clock=device.clock())
    layer = Layer(recording, device)
    first, second = layer.capture(), layer.capture()
    nodes = [sum(not isinstance(item, int) for item in graph._captured) for graph in (first, second)]
    assert nodes == [6 + EMPTY_EVENTS, 6]
    with recording.tracer.step():
        first.replay()
        second.replay()
    step = finish_step(recording, device, 1)
    inside = [row.duration_ns for row in step.phases if row.phase is not Phase.OUTSIDE]
    assert inside == [1_000, 5_000, 2_000] * 2


@pytest.mark.parametrize(
    ("times", "moved"),
    [
        ([100, 1_100, 1_150, 3_150], [100, 1_000, 1_000, 2_900]),
        ([100, 150, 180, 400], [100, 100, 100, 220]),
        ([], []),
    ],
)
def test_nothing_becomes_shorter_than_zero(times: list[int], moved: list[int]) -> None:
    """A gap below that of an empty pair is none, and order stays."""
    assert without_events(times, [7] * len(times), 100) == moved


def test_streams_of_a_graph_are_moved_each_by_its_own_events() -> None:
    """Events of another stream took none of this one's time."""
    assert without_events([0, 10, 1_000, 2_010], [7, 8, 7, 8], 100) == [0, 10, 900, 1_910]


class Block:
    """A layer that is wrapped as a whole, with its parts inside."""

    def __init__(self, recording: Any, device: FakeDevice, layer: int) -> None:
        tracer = recording.tracer
        self.parts = tracer.wrap(
            router=lambda ids: (device.work(1_000), ids)[1],
            experts=lambda: device.work(5_000),
            layer=layer,
            num_experts=4,
        )
        exchange = tracer.sites.add(Site(Role.EXCHANGE))
        self.exchange = timed(lambda: device.work(3_000), tracer, exchange)
        self.site = tracer.sites.add(Site(Role.LAYER, layer=layer, name=f"layers.{layer}"))
        self.run = timed(self._inside, tracer, self.site)

    def _inside(self) -> None:
        self.parts.router(torch.tensor([[0, 1], [1, 2]]))
        self.exchange()
        self.parts.experts()


def test_every_nth_layer_is_told_apart_in_a_graph(record: Make, device: FakeDevice) -> None:
    """The others are two events and one row `fused`: no time becomes outside, and no count is lost."""
    recording = record(clock=device.clock(), graph_layers=2)
    blocks = [Block(recording, device, layer) for layer in range(3)]
    graph = device.graph_class(device)
    graph.capture_begin()
    for block in blocks:
        block.run()
    graph.capture_end()
    assert sum(not isinstance(item, int) for item in graph._captured) == 8 + 2 + 8 + EMPTY_EVENTS
    with recording.tracer.step():
        graph.replay()
    step = finish_step(recording, device, 1)
    apart = ["router", "dispatch", "expert_gemm"]
    assert [(row.layer, str(row.phase), row.duration_ns) for row in step.phases] == [
        *zip([0] * 3, apart, [1_000, 3_000, 5_000], strict=True),
        (1, "fused", 9_000),
        *zip([2] * 3, apart, [1_000, 3_000, 5_000], strict=True),
    ]
    assert {row.layer for row in step.experts} == {0, 1, 2}
    assert step.expected_sites <= step.seen_sites
    assert step.unstamped_sites == frozenset()


def test_layer_sampling_is_for_graphs_only_and_the_coverage_report_names_the_layers(
    record: Make, device: FakeDevice
) -> None:
    """A step that runs eagerly shows every layer; by default there is nothing to say."""
    recording = record(clock=device.clock(), graph_layers=2)
    blocks = [Block(recording, device, layer) for layer in range(3)]
    with recording.tracer.step():
        for block in blocks:
            block.run()
    step = finish_step(recording, device, 1)
    assert "fused" not in {str(row.phase) for row in step.phases}
    assert recording.tracer.coverage().graph_layers == (0, 2)
    report = CoverageReport(layers=(), graph_layers=(0, 2))
    assert "only layers 0, 2 are told apart" in str(report)
    whole = record(clock=device.clock())
    Block(whole, device, 0)
    assert whole.tracer.coverage().graph_layers == ()


def test_layers_that_are_not_wrapped_as_a_whole_keep_their_events(record: Make, device: FakeDevice) -> None:
    """Without events their time would be outside of all layers."""
    recording = record(clock=device.clock(), graph_layers=3)
    layer = Layer(recording, device)
    graph = layer.capture()
    with recording.tracer.step():
        device.work(1_000)
        graph.replay()
    assert lines(finish_step(recording, device, 1).phases) == ["0 outside 0-1000", *PASS]
    assert recording.tracer.coverage().graph_layers == (0,)


def test_graphs_hold_checks_only_where_that_was_asked_for(record: Make, device: FakeDevice) -> None:
    """They would run in every replay, so it is the user's choice."""
    for asked in (False, True):
        recording = record(clock=device.clock(), check_graphs=asked)
        graph = Layer(recording, device).capture()
        (captured,) = graph_marks(recording)._graphs.values()
        assert captured.counter.checking is asked
        recording.tracer.shutdown()
        del graph
