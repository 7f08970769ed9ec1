"""What people do to models and processes: nothing of it breaks the model, hangs, or loses a step."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import moetrace
from moetrace.adapters.reference import ReferenceMoE
from moetrace.instrument.patches import mark_of
from moetrace.record.types import StepRecord
from moetrace.testing import MemoryEmitter
from moetrace_schemas.enums import CountKind, DropReason, Phase

from .conftest import Recording

Make = Callable[..., Recording]
HIDDEN = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
THREADS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Model(nn.Module):
    """Two reference layers; calls `between` between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ReferenceMoE(8, 16, num_experts=4, top_k=2) for _ in range(2))
        self.between: Callable[[], object] = int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        hidden = self.layers[0](hidden)
        self.between()
        result: torch.Tensor = self.layers[1](hidden)
        return result


class Streaming(nn.Module):
    """A forward that yields after each layer, as token streamers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each layer's result as it comes."""
        for layer in self.inner.layers:
            hidden = layer(hidden)
            yield hidden


def routed(step: StepRecord) -> list[tuple[int, int]]:
    """(layer, pairs)."""
    return [(row.layer, sum(row.counts)) for row in step.experts if row.kind is CountKind.ROUTED]


def accounted(recording: Recording) -> bool:
    """Every sampled step was emitted or dropped for a reason."""
    metrics = recording.tracer.metrics
    return metrics.steps_sampled == len(recording.emitter.records) + metrics.dropped.total()


# --- processes -----------------------------------------------------------------------------------


class Squares(Dataset[int]):
    """Numbers; a worker that has a tracer looks whether it is silent."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        with moetrace.step(), moetrace.phase("router", layer=0):
            return index * index


@THREADS
@pytest.mark.parametrize("context", [pytest.param("fork", marks=FORK), "spawn"])
def test_data_loader_workers_run_beside_a_recorded_step(context: str) -> None:
    """Workers that are forked or spawned inside a step neither hang nor write into it."""
    emitter, model = MemoryEmitter(), Model()
    moetrace.init(run_id="loader", endpoint="", emitters=[emitter])
    moetrace.instrument(model)
    with moetrace.step():
        loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=context)
        values = [int(value) for batch in loader for value in batch]
        model(HIDDEN)
    assert values == [index * index for index in range(8)]
    assert moetrace.shutdown()
    (step,) = emitter.records
    assert routed(step) == [(0, 10), (1, 10)]
    assert not [row for row in step.phases if row.phase is Phase.ROUTER and row.layer not in (0, 1)]


def _record_in_child(results: Any) -> None:
    """A child that traces on its own account."""
    torch.set_num_threads(1)
    emitter, model = MemoryEmitter(), Model()
    moetrace.init(run_id="child", endpoint="", emitters=[emitter])
    moetrace.instrument(model)
    model(HIDDEN)
    delivered = moetrace.shutdown(timeout_s=10)
    results.put((delivered, [routed(step) for step in emitter.records]))


@THREADS
@pytest.mark.parametrize("context", [pytest.param("fork", marks=FORK), "spawn"])
def test_a_child_may_start_a_tracer_of_its_own(context: str) -> None:
    """Fork after init: the inherited tracer is silent, a new one has a thread of its own and works."""
    parent = MemoryEmitter()
    moetrace.init(run_id="parent", endpoint="", emitters=[parent])
    children = multiprocessing.get_context(context)
    results = children.SimpleQueue()
    child = children.Process(target=_record_in_child, args=(results,))
    child.start()
    assert results.get() == (True, [[(0, 10), (1, 10)]])
    child.join(20)
    assert child.exitcode == 0
    with moetrace.step():
        pass
    moetrace.shutdown()
    assert len(parent.records) == 1


def _step_in_child(results: Any, model: nn.Module) -> None:
    """A child that goes on as if it were its parent."""
    torch.set_num_threads(1)
    lines: list[str] = []
    listen = logging.Handler()
    listen.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moetrace").addHandler(listen)
    tracer = moetrace.current_tracer()
    for _ in range(3):
        with moetrace.step():
            pass
    model(HIDDEN)  # without a step around it
    results.put((moetrace.shutdown(timeout_s=10), dict(tracer.metrics.dropped), lines))


@THREADS
@FORK
def test_a_forked_child_that_records_nothing_says_so() -> None:
    """One warning, all of its steps counted, shutdown False; the parent's own steps are not its affair."""
    parent, model = MemoryEmitter(), Model()
    moetrace.init(run_id="parent", endpoint="", emitters=[parent])
    moetrace.instrument(model)
    with moetrace.step():
        pass
    children = multiprocessing.get_context("fork")
    results = children.SimpleQueue()
    child = children.Process(target=_step_in_child, args=(results, model))
    child.start()
    delivered, dropped, lines = results.get()
    child.join(20)
    assert child.exitcode == 0
    assert not delivered
    assert dropped == {DropReason.FORKED: 4}
    assert len([line for line in lines if "forked" in line and "moetrace.init()" in line]) == 1
    assert moetrace.shutdown()
    assert len(parent.records) == 1


@THREADS
@FORK
def test_a_forked_child_without_steps_has_lost_nothing() -> None:
    """Workers that do not step are not bothered."""
    moetrace.init(run_id="parent", endpoint="", emitters=[MemoryEmitter()])
    children = multiprocessing.get_context("fork")
    results = children.SimpleQueue()
    child = children.Process(target=lambda: results.put(moetrace.shutdown()))
    child.start()
    assert results.get() is True
    child.join(20)


# --- threads -------------------------------------------------------------------------------------


def test_forwards_of_several_threads_break_nothing(record: Make) -> None:
    """Each gets the plain result; every sampled step is emitted or dropped for a reason."""
    recording, model = record(), Model()
    expected = model(HIDDEN)
    recording.tracer.instrument(model)
    results: list[torch.Tensor] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(10)
        for _ in range(10):
            with torch.no_grad():
                results.append(model(HIDDEN))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    assert all(torch.equal(result, expected) for result in results)
    recording.tracer.shutdown()
    assert accounted(recording)
    assert recording.tracer.guard.errors == {}
    for step in recording.emitter.records:
        assert sum(row.duration_ns for row in step.phases) == step.duration_ns


def test_a_step_of_another_thread_takes_the_place_of_the_open_one(record: Make) -> None:
    """One step at a time: the one that was open is dropped and counted, and its end ends nothing else."""
    recording = record()

    def other() -> None:
        with recording.tracer.step(7):
            pass

    with recording.tracer.step(3):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [step.step for step in recording.records()] == [7]
    assert recording.tracer.metrics.dropped == {DropReason.STEP_ABORTED: 1}


# --- modes of torch ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_model_is_recorded_alike_in_every_grad_mode(record: Make, mode: Callable[[], Any]) -> None:
    """Whatever mode it was instrumented in; the result is the plain one."""
    recording, model = record(), Model()
    with mode():
        expected = model(HIDDEN)
        recording.tracer.instrument(model)
        assert torch.equal(model(HIDDEN), expected)
    with torch.no_grad():
        assert torch.equal(model(HIDDEN), expected)
    with torch.inference_mode():
        assert torch.equal(model(HIDDEN), expected)
    model(HIDDEN).sum().backward()
    assert [routed(step) for step in recording.records()] == [[(0, 10), (1, 10)]] * 4
    assert recording.tracer.guard.errors == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_changes_its_type_is_recorded_on(record: Make, dtype: torch.dtype) -> None:
    """`model.to(..)` behind instrument: parameters are new, wrappers stay, numbers are those of that type."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    model(HIDDEN)
    model.to(dtype)
    traced = model(HIDDEN.to(dtype))
    recording.tracer.uninstrument()
    assert torch.equal(model(HIDDEN.to(dtype)), traced)
    assert [routed(step) for step in recording.records()] == [[(0, 10), (1, 10)]] * 2
    assert [step.violations for step in recording.emitter.records] == [(), ()]


class TopK(nn.Module):
    """A router that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, hidden: torch.Tensor) -> Any:
        """The best two of four: weights and ids."""
        return self.gate(hidden).softmax(-1).topk(2)


def test_a_model_that_moves_to_another_kind_of_device_runs_on(record: Make) -> None:
    """Counting there would be a sync: a line says what to do, the model goes on, and is counted when back."""
    recording, router = record(buffers=4), TopK()
    recording.tracer.wrap(router=router, layer=0, num_experts=4)

    def step(hidden: torch.Tensor) -> str:
        with recording.tracer.step(), torch.no_grad():
            return str(router(hidden)[1].device.type)

    assert step(HIDDEN) == "cpu"
    router.to("meta")
    assert step(HIDDEN.to("meta")) == "meta"
    router.to_empty(device="cpu").load_state_dict(TopK().state_dict())
    assert step(HIDDEN) == "cpu"
    assert [routed(step) for step in recording.records()] == [[(0, 10)], [], [(0, 10)]]
    assert recording.tracer.guard.errors == {"counts": 1}
    assert all(len(step.seen_sites) == 1 for step in recording.emitter.records)


# --- forwards of other shapes --------------------------------------------------------------------


def test_a_forward_that_is_a_generator_is_a_step_from_its_first_value_to_its_end(record: Make) -> None:
    """Its layers run while it is asked for values, so that is when the step is open."""
    recording, model = record(), Streaming()
    expected = [value.clone() for value in model(HIDDEN)]
    recording.tracer.instrument(model)
    stream = model(HIDDEN)
    assert recording.tracer.buffer is None
    got = [next(stream)]
    assert recording.tracer.buffer is not None
    got += list(stream)
    assert recording.tracer.buffer is None
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    (step,) = recording.records()
    assert routed(step) == [(0, 10), (1, 10)]
    assert recording.tracer.coverage().silent == ()


def test_a_generator_that_is_given_up_ends_its_step(record: Make) -> None:
    """Closed or thrown into: the step holds what ran until then."""
    recording, model = record(), Streaming()
    recording.tracer.instrument(model)
    stream = model(HIDDEN)
    next(stream)
    stream.close()
    stream = model(HIDDEN)
    next(stream)
    with pytest.raises(KeyError, match="stop"):
        stream.throw(KeyError("stop"))
    assert recording.tracer.buffer is None
    assert [routed(step) for step in recording.records()] == [[(0, 10)], [(0, 10)]]


def test_a_generator_inside_a_step_belongs_to_it(record: Make) -> None:
    """As any forward."""
    recording, model = record(), Streaming()
    recording.tracer.instrument(model)
    with recording.tracer.step(5):
        assert len(list(model(HIDDEN))) == 2
    (step,) = recording.records()
    assert (step.step, routed(step)) == (5, [(0, 10), (1, 10)])


# --- taking it back at a bad moment --------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same thread", "another thread"])
def test_uninstrumenting_in_the_middle_of_a_forward(record: Make, elsewhere: bool) -> None:
    """The forward ends with the plain result, and the step with what it had; nothing stays wrapped."""
    recording, model = record(), Model()
    expected = model(HIDDEN)
    recording.tracer.instrument(model)

    def take_back() -> None:
        if not elsewhere:
            recording.tracer.uninstrument()
            return
        thread = threading.Thread(target=recording.tracer.uninstrument)
        thread.start()
        thread.join()

    model.between = take_back
    assert torch.equal(model(HIDDEN), expected)
    model.between = int
    assert torch.equal(model(HIDDEN), expected)
    assert not [m for m in model.modules() if any(mark_of(value) for value in vars(m).values())]
    (step,) = recording.records()
    assert routed(step) == [(0, 10)]
    assert recording.tracer.guard.errors == {}


def test_shutdown_in_the_middle_of_a_forward(record: Make) -> None:
    """The step is dropped and counted; the forward ends as if nothing had been."""
    recording, model = record(), Model()
    expected = model(HIDDEN)
    recording.tracer.instrument(model)
    model.between = recording.tracer.shutdown
    assert torch.equal(model(HIDDEN), expected)
    assert accounted(recording)
    assert recording.tracer.metrics.dropped == {DropReason.STEP_ABORTED: 1}


def test_an_exception_inside_a_phase_leaves_the_next_step_whole(record: Make) -> None:
    """The step with the fault ends there, and the one behind it is as ever."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)

    def fail() -> None:
        raise KeyError("data")

    model.between = fail
    with pytest.raises(KeyError, match="data"):
        model(HIDDEN)
    model.between = int
    model(HIDDEN)
    assert [routed(step) for step in recording.records()] == [[(0, 10)], [(0, 10), (1, 10)]]


# --- a long run ----------------------------------------------------------------------------------


class Nowhere:
    """Takes every record and keeps none."""

    name = "nowhere"

    def __init__(self) -> None:
        self.taken = 0

    def emit(self, record: StepRecord) -> None:
        """Count it."""
        self.taken += 1

    def close(self, deadline_monotonic_s: float) -> bool:
        """Nothing is queued."""
        return True


def test_a_model_is_let_go_of_when_it_is_uninstrumented(record: Make) -> None:
    """As the limits say: from then on nothing of ours keeps it, recorded steps or not."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    with recording.tracer.step():
        model(HIDDEN)
    gone = weakref.ref(model)
    recording.tracer.uninstrument(model)
    recording.emitter.wait_for(1)
    del model
    gc.collect()
    assert gone() is None


def test_memory_does_not_grow_with_steps() -> None:
    """Thousands of steps, recorded and not: no more objects and bytes behind them than before.

    `benchmarks/growth.py` does the same for a million.
    """
    emitter, model = Nowhere(), Model()
    tracer = moetrace.init(run_id="long", endpoint="", sample="1/4", emitters=[emitter], check_steps=3)
    moetrace.instrument(model)

    def run(steps: int) -> tuple[int, int]:
        with torch.no_grad():
            for _ in range(steps):
                model(HIDDEN[:1])
        # Only what the drain thread has finished with counts as steady.
        deadline = threading.Event()
        while emitter.taken + tracer.metrics.dropped.total() < tracer.metrics.steps_sampled:
            deadline.wait(0.001)
        gc.collect()
        return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        run(200)
        objects, size = run(200)
        more_objects, more_size = run(2000)
    finally:
        tracemalloc.stop()
    assert emitter.taken > 100
    assert more_objects - objects < 100
    assert more_size - size < 20_000
    assert tracer.guard.errors == {}
