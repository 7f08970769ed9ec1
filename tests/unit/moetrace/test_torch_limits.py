"""What a release of torch lacks costs what it would tell, and a word of it: never an import or the model."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_models import Decoder, Ticks, equal, needs_marks, train
from moetrace.instrument import backward, compiled, torch_state
from moetrace.timing.clock import HostClock
from moetrace.timing.cuda_events import CudaDevice
from moetrace_schemas.enums import CountKind, Direction, Phase

Make = Callable[..., Any]

GRAPH_TASK = "_C._current_graph_task_id"
NODE = "_C._current_autograd_node"
PROGRAM = """
import logging, operator, sys
import torch, torch.utils.checkpoint
logging.basicConfig(format="%(message)s")
names = sys.argv[1:]
kept = []
for name in names:
    owner, _, attribute = name.rpartition(".")
    owner = operator.attrgetter(owner)(torch)
    kept.append((owner, attribute, getattr(owner, attribute)))
    delattr(owner, attribute)
from moetrace.instrument import autograd_state, backward, compiled
# This torch needs them itself.
for owner, attribute, value in kept:
    setattr(owner, attribute, value)
import moetrace
from compiled_models import Decoder, equal, train
from moetrace.testing import MemoryEmitter

class Checkpointed(Decoder):
    def forward(self, tokens):
        for layer in self.layers:
            again = torch.utils.checkpoint.checkpoint(layer, self.norm(tokens), use_reentrant=False)
            tokens = tokens + again
        return tokens

model, emitter = Checkpointed(), MemoryEmitter()
plain = train(model, model.parameters())
tracer = moetrace.init(run_id="r", emitters=[emitter], rank=0, world_size=1)
assert moetrace.instrument(model)
with moetrace.step():
    assert equal(plain, train(model, model.parameters()))
moetrace.shutdown()
assert tracer.guard.errors == {}, tracer.guard.errors
(step,) = emitter.records
print(sum(sum(row.counts) for row in step.experts if row.kind == "routed"))
"""


@pytest.mark.parametrize(
    ("lacks", "routed", "told"),
    [
        ([GRAPH_TASK], 24, ""),
        ([NODE], 24, ""),
        (["_C._autograd._get_sequence_nr"], 24, ""),
        ([GRAPH_TASK, NODE], 48, "activation recompute is counted as forward"),
    ],
    ids=["graph task", "node", "numbers of nodes", "graph task and node"],
)
def test_a_name_that_torch_does_not_have_costs_what_it_says(lacks: list[str], routed: int, told: str) -> None:
    """Training with checkpoints is the same bits; recompute is told apart by either name, or that is said."""
    folder = Path(sys.modules["compiled_models"].__file__ or "").parent
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *lacks],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), *sys.path))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == routed
    assert ran.stderr.count("moetrace:") == bool(told), ran.stderr
    assert told in ran.stderr


@needs_marks
def test_a_torch_that_keeps_marks_is_taken_for_one() -> None:
    """All of them, forward and backward: nothing is missing from compiled graphs there."""
    assert compiled.AVAILABLE is True
    assert compiled.LIMITS == []


@needs_marks
@pytest.mark.parametrize("version", ["parrot", "", "2.x-ours"])
def test_a_version_that_is_no_number_is_a_new_one(version: str) -> None:
    """Builds may be named anything; the name is no reason to fail, nor to do without marks."""
    program = f"""
import torch
from torch.torch_version import TorchVersion
kept, torch.__version__ = torch.__version__, TorchVersion({version!r})
from moetrace.instrument import compiled
torch.__version__ = kept
assert compiled._is_exporting is torch.compiler.is_exporting
assert compiled.AVAILABLE and compiled.LIMITS == []
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_compiled_model_is_recorded_or_the_reason_is_told(
    record: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Under every torch: the same bits in one graph; recorded, or a warning names torch."""
    model = Decoder()
    plain = train(torch.compile(model, backend="aot_eager", fullgraph=True), model.parameters())
    torch._dynamo.reset()
    recording = record(clock=HostClock(Ticks().now_ns))
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    with caplog.at_level(logging.WARNING):
        with recording.tracer.step():
            assert equal(plain, train(run, model.parameters()))
        (step,) = recording.emitter.wait_for(1)
    coverage = recording.tracer.coverage()
    assert recording.tracer.guard.errors == {}
    if compiled.AVAILABLE:
        assert {row.phase for row in step.phases} >= {Phase.ROUTER, Phase.FUSED}
        assert coverage.silent == ()
    else:
        assert {row.phase for row in step.phases} == {Phase.OUTSIDE}
        assert {site.code for site in coverage.silent} == {"compiled"}
        assert f"torch {torch.__version__} keeps no marks in compiled graphs" in caplog.text


def test_nodes_that_cannot_be_watched_cost_the_backward_alone(
    record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: the forward of every step is recorded."""

    def without_numbers(*_: Any) -> Any:
        raise AttributeError("'Node' object has no attribute '_sequence_nr'")

    monkeypatch.setattr(backward, "_nodes", without_numbers)
    recording = record(clock=HostClock(Ticks().now_ns), buffers=16)
    model = Decoder()
    recording.tracer.instrument(model)
    for _ in range(8):
        with recording.tracer.step():
            train(model, model.parameters())
    steps = recording.records()
    assert set(recording.tracer.guard.errors) == {"backward"}
    assert len(steps) == 8
    for step in steps:
        assert {row.direction for row in step.phases} == {Direction.FORWARD}
        assert {row.phase for row in step.phases} >= {Phase.ROUTER, Phase.FUSED}
        assert [sum(row.counts) for row in step.experts if row.kind is CountKind.ROUTED] == [12, 12]


def test_what_graphs_of_this_torch_do_not_hold_is_in_the_report(
    record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's version and the reason."""
    monkeypatch.setattr(compiled, "LIMITS", [])
    compiled._limited("compiled graphs", "keeps no marks in them", AttributeError("no attribute 'x'\nmore"))
    report = record().tracer.instrument(Decoder())
    told = f"torch {torch.__version__} keeps no marks in them (no attribute 'x')"
    assert ("compiled graphs", told) in report.skipped


def test_a_torch_without_functional_collectives_has_its_others_wrapped(
    record: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and the exchange of torch.distributed is seen."""
    monkeypatch.setitem(sys.modules, "torch.distributed._functional_collectives", None)
    plain = torch.distributed.all_to_all_single
    tracer = record().tracer
    with caplog.at_level(logging.WARNING):
        tracer._installer.functions.hook_collectives()
    assert torch.distributed.all_to_all_single is not plain
    tracer._installer.functions.restore()
    assert torch.distributed.all_to_all_single is plain
    assert caplog.text.count("functional collectives are not told apart") == 1


def test_a_torch_whose_compiler_counts_nothing_has_compiled_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps ask at their begin and end."""
    import torch._dynamo.utils

    monkeypatch.delattr(torch._dynamo.utils, "counters")
    assert torch_state.graphs_compiled() == 0


class OldEvent:
    """torch.cuda.Event before it could be part of a captured graph."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.enable_timing = enable_timing


class NewEvent(OldEvent):
    """As it is now."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, external: bool = False) -> None:
        super().__init__(enable_timing, blocking)


def _cuda_as(monkeypatch: pytest.MonkeyPatch, event: Any, *, hip: str | None = None) -> None:
    """As much of torch.cuda as a device is asked for when it is first seen."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.Stream(device="cpu"))
    monkeypatch.delattr(torch._C, "_cuda_getCurrentStream", raising=False)


@pytest.mark.parametrize(("event", "has_graph_events"), [(OldEvent, False), (NewEvent, True)])
def test_graphs_are_marked_where_events_can_be_part_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, event: Any, has_graph_events: bool
) -> None:
    """Else a warning says what replays then are; streams are told apart in either case."""
    _cuda_as(monkeypatch, event)
    with caplog.at_level(logging.WARNING):
        device = CudaDevice()
    assert device.graph_events is has_graph_events
    assert ("no events for captured graphs" in caplog.text) is not has_graph_events
    assert device.stream() == torch.Stream(device="cpu").stream_id


def test_on_rocm_no_event_goes_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes `external=True` and cannot time such events: none is made, and replays are one row each."""
    made: list[bool] = []

    class Event(NewEvent):
        def __init__(self, **how: bool) -> None:
            made.append(how.get("external", False))

    _cuda_as(monkeypatch, Event, hip="6.2")
    device = CudaDevice()
    assert device.graph_events is False
    assert made == []
    device.new_event()
    assert made == [False]


@pytest.mark.parametrize(("connections", "one_queue"), [("1", True), ("8", False), (None, False)])
def test_one_hardware_queue_is_seen_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, connections: str | None, one_queue: bool
) -> None:
    """As Megatron's overlap asks for; what follows from it is tested in test_timing.py."""
    _cuda_as(monkeypatch, NewEvent)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert CudaDevice().one_queue is one_queue
