"""Waits that DeepEP's low-latency kernels sum, against a stand-in with the signatures of deep_ep.Buffer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moetrace.instrument import wait_stats
from moetrace.instrument.routing import StepCounter
from moetrace.record.count_sites import CountSite
from moetrace.record.types import WaitRow
from moetrace.testing import FakeTime
from moetrace_schemas.enums import Phase

from . import deep_ep_package as deep_ep
from .conftest import Recording

Make = Callable[..., Recording]
WAITS = torch.tensor([0, 5, 70, 6])
X = torch.ones(2, 2)
IDS = torch.tensor([[0, 1], [1, 2]])


ARRIVING = deep_ep.Arriving([[0]], 1, 1, 4)


def made(package: Any) -> Any:
    """A buffer of four ranks whose kernels wait as WAITS says."""
    buffer = package.Buffer(FakeTime(), ARRIVING)
    buffer.waits = WAITS
    return buffer


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """deep_ep, imported."""
    module = deep_ep.package(deep_ep.Buffer, deep_ep.ElasticBuffer)
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    yield module
    wait_stats._tensors.clear()


def instrumented(record: Make, **settings: Any) -> tuple[Recording, Callable[..., Any]]:
    """A tracer that counts one layer, and its router."""
    recording = record(**{"wait_stats": True, **settings})
    parts = recording.tracer.wrap(router=lambda ids: ids, layer=0, num_experts=4)
    return recording, parts.router


def run_step(recording: Recording, body: Callable[[], object]) -> tuple[WaitRow, ...]:
    """Waits of one recorded step."""
    before = len(recording.emitter.records)
    with recording.tracer.step():
        body()
    return recording.emitter.wait_for(before + 1)[-1].waits


def exchange(buffer: Any) -> None:
    """One layer, keyword and positional style."""
    buffer.low_latency_dispatch(X, None, 8, 4, return_recv_hook=False)
    buffer.low_latency_dispatch(X, None, 8, 4, None, None, False)
    buffer.low_latency_combine(x=X, topk_idx=None, topk_weights=None, handle=("handle",))


def test_waits_are_summed_per_step_and_phase(record: Make, package: Any) -> None:
    """Left out or given as None: a tensor of ours goes in, at one address; each step has its own sums."""
    recording, router = instrumented(record)
    buffer = made(package)
    for _ in range(2):
        assert run_step(recording, lambda: (router(IDS), exchange(buffer))) == (
            WaitRow(phase=Phase.DISPATCH, waits=(0, 10, 140, 12)),
            WaitRow(phase=Phase.COMBINE, waits=(0, 10, 140, 12)),
        )
    addresses = {tensor.data_ptr() for tensor in buffer.wait_stats}
    assert len(buffer.wait_stats) == 6
    assert len(addresses) == 2
    assert recording.tracer.guard.errors == {}


def test_a_tensor_of_the_callers_stays_the_callers(record: Make, package: Any) -> None:
    """By position or by name: it is passed on, and nothing is zeroed or told."""
    recording, router = instrumented(record)
    buffer, own = made(package), torch.zeros(4, dtype=torch.int64)

    def body() -> None:
        router(IDS)
        buffer.low_latency_dispatch(X, None, 8, 4, None, own)
        buffer.low_latency_combine(X, None, None, None, combine_wait_recv_cost_stats=own)

    assert run_step(recording, body) == ()
    assert run_step(recording, body) == ()
    assert all(tensor is own for tensor in buffer.wait_stats)
    assert own.tolist() == (WAITS * 6).tolist()


def test_nothing_is_passed_outside_of_recorded_steps_or_unasked(record: Make, package: Any) -> None:
    """The caller's call is then the caller's own."""
    recording, _ = instrumented(record)
    buffer = made(package)
    exchange(buffer)
    assert buffer.wait_stats == [None] * 3
    recording.tracer.shutdown()
    plain, router = instrumented(record, wait_stats=False)
    assert run_step(plain, lambda: (router(IDS), exchange(buffer))) == ()
    assert buffer.wait_stats == [None] * 6


@pytest.mark.parametrize("size", [None, "four", 0])
def test_a_buffer_that_does_not_say_its_ranks_is_left_alone(record: Make, package: Any, size: object) -> None:
    """A tensor of the wrong size would be an error of the kernel's."""
    recording, router = instrumented(record)
    buffer = made(package)
    buffer.group_size = size
    assert run_step(recording, lambda: (router(IDS), exchange(buffer))) == ()
    assert buffer.wait_stats == [None] * 3


def test_buffers_without_the_parameter_are_called_as_they_are(record: Make, package: Any) -> None:
    """ElasticBuffer sums no waits."""
    recording, router = instrumented(record)
    assert (
        run_step(recording, lambda: (router(IDS), package.ElasticBuffer(FakeTime(), ARRIVING).dispatch(X)))
        == ()
    )
    assert recording.tracer.guard.errors == {}


def test_replays_of_a_graph_add_to_the_step_that_they_are_in() -> None:
    """Zeroed when the step begins, whatever was replayed before it; the address is the captured one."""
    buffer = deep_ep.Buffer(FakeTime(), ARRIVING)
    tensor = wait_stats.tensor_of(buffer, X)
    assert tensor is not None
    sites = [CountSite(0, 4)]
    graph, step = StepCounter(sites, torch.device("cpu")), StepCounter(sites, torch.device("cpu"))
    graph.waits.used[id(tensor)] = tensor
    tensor[0] += 99
    step.begin(checking=False)
    for _ in range(2):
        tensor[0] += WAITS
        step.merge(graph)
    step.finish()
    assert step.ready()
    assert step.waits.rows() == (WaitRow(phase=Phase.DISPATCH, waits=(0, 10, 140, 12)),)
    step.begin(checking=False)
    step.finish()
    assert step.waits.rows() == ()
    assert wait_stats.tensor_of(buffer, X) is tensor


def test_steps_without_such_calls_tell_no_waits(record: Make, package: Any) -> None:
    """Missing is missing, and not zero."""
    recording, router = instrumented(record)
    buffer = made(package)
    run_step(recording, lambda: (router(IDS), exchange(buffer)))
    assert run_step(recording, lambda: router(IDS)) == ()
