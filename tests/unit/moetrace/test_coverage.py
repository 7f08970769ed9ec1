"""Coverage while running: what never fired is named once, with the reason that there is evidence of."""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compiled_models import needs_marks
from moetrace.adapters.reference import ReferenceMoE
from moetrace.emit.wire import span_attributes
from moetrace.testing import FakeDevice
from moetrace.timing.cuda_events import CudaClock
from moetrace.tracer import Tracer
from moetrace_schemas import attributes

from .conftest import Recording
from .records import CONTEXT

Make = Callable[..., Recording]
SITES_PER_LAYER = 7
HIDDEN = torch.ones(2, 8)


class Model(nn.Module):
    """Two MoE layers, the second of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ReferenceMoE(8, 16, num_experts=4, top_k=2) for _ in range(2))
        self.first_only = False
        self.meanwhile: Callable[[], object] = int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Calls `meanwhile` first."""
        self.meanwhile()
        for layer in self.layers[: 1 if self.first_only else 2]:
            hidden = hidden + layer(hidden)
        return hidden


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    # Graphs that other tests compiled in this process are no evidence here.
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()


def silent(tracer: Tracer) -> dict[str, str]:
    """Code of the reason by call site."""
    return {site.name: site.code for site in tracer.coverage().silent}


def run_step(recording: Recording, body: Callable[[], object]) -> None:
    """One recorded step, drained."""
    before = len(recording.emitter.records)
    with recording.tracer.step():
        body()
    recording.emitter.wait_for(before + 1)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines about coverage."""
    return [record.getMessage() for record in caplog.records if "did not fire" in record.getMessage()]


def test_a_healthy_model_is_covered_and_nothing_is_said(
    record: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Every expected site fires; the report carries the figures, and no line is logged."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    assert recording.tracer.coverage().recorded_steps == 0
    for _ in range(3):
        run_step(recording, lambda: model(HIDDEN))
    report = recording.tracer.coverage()
    assert (report.recorded_steps, report.expected_sites, report.silent) == (3, 2 * SITES_PER_LAYER, ())
    assert "14 of 14 call sites fired in 3 recorded steps" in str(report)
    assert len(report.layers) == 2
    assert warnings(caplog) == []


def test_a_replaced_method_is_named_once(record: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Someone puts a fast kernel in place of a wrapped method: one line for all steps, and it says so."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    plain = ReferenceMoE.compute
    model.layers[1].compute = lambda dispatched: plain(model.layers[1], dispatched)
    with caplog.at_level(logging.WARNING, "moetrace"):
        for _ in range(3):
            run_step(recording, lambda: model(HIDDEN))
    assert silent(recording.tracer) == {"layers.1.compute": "replaced"}
    (line,) = warnings(caplog)
    assert "1 of 14 wrapped call sites did not fire in step 0" in line
    assert "layers.1.compute (something else stands in its place" in line
    assert "silent layers.1.compute: something else stands" in str(recording.tracer.coverage())


def test_a_layer_that_takes_another_path_is_told_from_one_that_does_not_run(record: Make) -> None:
    """A fused path inside a layer that ran, against a layer that nobody called."""
    recording, model = record(), Model()
    model.first_only = True
    model.layers[0].__class__ = type("Fused", (ReferenceMoE,), {"forward": _fused_forward})
    recording.tracer.instrument(model)
    run_step(recording, lambda: model(HIDDEN))
    reasons = silent(recording.tracer)
    assert reasons.pop("layers.0.permute") == "other_path"
    assert set(reasons.values()) == {"layer_not_run"}
    assert len(reasons) == SITES_PER_LAYER


def _fused_forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    weights, ids = self.route(hidden)
    permuted = ReferenceMoE.permute(self, hidden, ids)
    dispatched = self.dispatch(permuted)
    returned = self.combine(self.compute(dispatched), dispatched)
    result: torch.Tensor = self.unpermute(returned, permuted, weights)
    return result


def test_a_copy_that_runs_in_place_of_the_model_is_the_wrong_object(
    record: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The commonest fault: instrument one object, run another."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    twin = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "moetrace"):
        run_step(recording, lambda: twin(HIDDEN))
    reasons = silent(recording.tracer)
    assert len(reasons) == 2 * SITES_PER_LAYER
    assert set(reasons.values()) == {"wrong_object"}
    (line,) = warnings(caplog)
    assert "14 of 14" in line
    assert "and 11 more (the instrumented model was not called in the step" in line


def test_a_model_that_is_compiled_in_place_is_named_so(record: Make) -> None:
    """`module.compile()` runs the traced code without the calls."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    # As `model.layers[0].compile()` leaves it, without the minutes of a compiler.
    layer = model.layers[0]
    layer._compiled_call_impl = lambda hidden: hidden
    run_step(recording, lambda: model(HIDDEN))
    reasons = silent(recording.tracer)
    assert set(reasons.values()) == {"compiled"}
    assert {name.rpartition(".")[0] for name in reasons} == {"layers.0"}


def test_a_forward_that_outlives_its_step_in_another_thread_is_named_so(record: Make) -> None:
    """A step around the start of a background forward records none of its layers."""
    device = FakeDevice()
    recording, model = record(clock=CudaClock(device)), Model()
    recording.tracer.instrument(model)
    inside, over = threading.Event(), threading.Event()

    def meanwhile() -> None:
        inside.set()
        assert over.wait(10)

    model.meanwhile = meanwhile
    thread = threading.Thread(target=model, args=(HIDDEN,))
    with recording.tracer.step():
        device.work(1_000)
        thread.start()
        assert inside.wait(10)
    over.set()
    thread.join()
    # Only now can the step be resolved, and is judged.
    device.finish()
    recording.emitter.wait_for(1)
    assert set(silent(recording.tracer).values()) == {"other_thread"}


def test_a_forward_that_ended_behind_its_step_is_noted(record: Make) -> None:
    """The evidence for the reason above."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    (entry,) = recording.tracer._installer.installed
    run_step(recording, lambda: model(HIDDEN))
    assert (entry.calls.started, entry.calls.outlived) == (1, 0)
    scope = recording.tracer.step()
    scope.__enter__()
    model.meanwhile = lambda: scope.__exit__(None, None, None)
    model(HIDDEN)
    assert (entry.calls.started, entry.calls.outlived) == (2, 1)


def test_a_call_that_is_only_captured_is_named_so(record: Make) -> None:
    """While a device graph is captured a call gets no time stamp; replays pass it by."""
    device = FakeDevice()
    recording = record(clock=CudaClock(device), max_intervals=16)

    def part() -> None:
        device.work(1_000)

    wrapped = recording.tracer.wrap(router=part, experts=part, layer=0)
    with recording.tracer.step():
        wrapped.router()
        device.capturing = True
        wrapped.experts()
        device.capturing = False
    device.finish()
    recording.emitter.wait_for(1)
    assert silent(recording.tracer) == {"wrap.experts[0]": "captured"}


def test_a_wrapped_callable_that_is_not_used_is_named_so(record: Make) -> None:
    """`wrap` returns the wrapped callables; who goes on to call the plain ones records nothing."""
    recording = record()
    wrapped = recording.tracer.wrap(router=int, experts=int, layer=0)
    run_step(recording, wrapped.router)
    assert silent(recording.tracer) == {"wrap.experts[0]": "not_called"}


def test_what_fires_later_is_no_longer_silent(record: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A layer that only some steps run: the gauge follows each step, the list is of what never fired."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    model.first_only = True
    with caplog.at_level(logging.WARNING, "moetrace"):
        run_step(recording, lambda: model(HIDDEN))
        assert len(silent(recording.tracer)) == SITES_PER_LAYER
        assert recording.tracer.metrics.seen_sites == SITES_PER_LAYER
        model.first_only = False
        run_step(recording, lambda: model(HIDDEN))
    assert silent(recording.tracer) == {}
    assert recording.tracer.metrics.seen_sites == 2 * SITES_PER_LAYER
    assert len(warnings(caplog)) == 1


def test_what_is_wrapped_inside_a_step_is_not_missing_in_it(
    record: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A step is judged by what was wrapped when it began."""
    recording, model = record(), Model()
    with recording.tracer.step():
        model(HIDDEN)
        recording.tracer.instrument(model)
    recording.emitter.wait_for(1)
    run_step(recording, lambda: model(HIDDEN))
    assert silent(recording.tracer) == {}
    assert warnings(caplog) == []


def test_both_figures_travel_with_every_step(record: Make) -> None:
    """The collector sees expected and seen sites of each rank, also where it cannot scrape the rank."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    model.first_only = True
    run_step(recording, lambda: model(HIDDEN))
    (step,) = recording.records()
    sent = span_attributes(step, CONTEXT, sample_period=1, model_name="", model_version="")
    assert sent[attributes.COVERAGE_EXPECTED_SITES] == 2 * SITES_PER_LAYER
    assert sent[attributes.COVERAGE_SEEN_SITES] == SITES_PER_LAYER


@torch.no_grad()
@needs_marks
def test_a_compiled_model_is_covered_and_nothing_is_said(
    record: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Its forward is traced and its wrapper never runs; the marks in the graph fire all the same."""
    recording = record()
    model = Model()
    recording.tracer.instrument(model)
    run: Any = torch.compile(model, backend="eager")
    for _ in range(2):
        run_step(recording, lambda: run(HIDDEN))
    assert silent(recording.tracer) == {}
    assert warnings(caplog) == []
    assert recording.tracer.metrics.seen_sites == 2 * SITES_PER_LAYER


@torch.no_grad()
@pytest.mark.parametrize("when", ["as a whole", "its layers in place", "its layers", "its forward"])
def test_a_compiled_model_without_marks_is_named_so(record: Make, when: str) -> None:
    """With compiled=False only what runs between graphs fires; of the rest, that is the reason."""
    torch._dynamo.reset()
    recording = record(compiled=False)
    model = Model()
    recording.tracer.instrument(model)
    run: Any = model
    if when == "as a whole":
        run = torch.compile(model, backend="eager")
    elif when == "its forward":
        model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    elif when == "its layers":
        for at, layer in enumerate(model.layers):
            model.layers[at] = torch.compile(layer, backend="eager")  # type: ignore[assignment]
    else:
        for layer in model.layers:
            layer.compile(backend="eager")
    run_step(recording, lambda: run(HIDDEN))
    reasons = silent(recording.tracer)
    assert {"layers.0.route", "layers.1.combine"} <= reasons.keys()
    assert set(reasons.values()) == {"compiled"}
