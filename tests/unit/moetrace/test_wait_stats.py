"""Waits that DeepEP's low-latency kernels sum, against a fake with the signatures of deep_ep.Buffer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from moetrace.instrument import wait_stats
from moetrace.instrument.routing import StepCounter
from moetrace.record.count_sites import CountSite
from moetrace.record.types import WaitRow
from moetrace_schemas.enums import Phase

from .conftest import Recording

Make = Callable[..., Recording]
WAITS = torch.tensor([0, 5, 70, 6])
X = torch.ones(2, 2)
IDS = torch.tensor([[0, 1], [1, 2]])


class Buffer:
    """Adds to the tensors that it is given, as the kernels do, and keeps them."""

    group_size: object = 4

    def __init__(self) -> None:
        self.given: list[torch.Tensor | None] = []

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Any:
        """(recv_x, recv_count, handle, event, hook)."""
        self._add(dispatch_wait_recv_cost_stats, 1)
        return x, None, ("handle", use_fp8), None, None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: Any,
        topk_weights: Any,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Any = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> Any:
        """(combined_x, event, hook)."""
        self._add(combine_wait_recv_cost_stats, 2)
        return x, None, None

    def _add(self, stats: torch.Tensor | None, times: int) -> None:
        self.given.append(stats)
        if stats is not None:
            assert (stats.dtype, stats.shape, stats.is_contiguous()) == (torch.int64, (4,), True)
            stats += WAITS * times


class ElasticBuffer:
    """Has no such parameter."""

    group_size = 4

    def dispatch(self, x: torch.Tensor, *, cumulative_local_expert_recv_stats: Any = None) -> Any:
        """(recv_x, event)."""
        return x, None


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """deep_ep, imported."""
    module: Any = ModuleType("deep_ep")
    module.Buffer = type("Buffer", (Buffer,), dict(vars(Buffer)))
    module.ElasticBuffer = type("ElasticBuffer", (ElasticBuffer,), dict(vars(ElasticBuffer)))
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
    buffer.low_latency_combine(X, None, None, ("handle",))


def test_waits_are_summed_per_step_and_phase(record: Make, package: Any) -> None:
    """Left out or given as None: a tensor of ours goes in, at one address; each step has its own sums."""
    recording, router = instrumented(record)
    buffer = package.Buffer()
    for _ in range(2):
        assert run_step(recording, lambda: (router(IDS), exchange(buffer))) == (
            WaitRow(phase=Phase.DISPATCH, waits=(0, 10, 140, 12)),
            WaitRow(phase=Phase.COMBINE, waits=(0, 10, 140, 12)),
        )
    addresses = {tensor.data_ptr() for tensor in buffer.given}
    assert len(buffer.given) == 6
    assert len(addresses) == 2
    assert recording.tracer.guard.errors == {}


def test_a_tensor_of_the_callers_stays_the_callers(record: Make, package: Any) -> None:
    """By position or by name: it is passed on, and nothing is zeroed or told."""
    recording, router = instrumented(record)
    buffer, own = package.Buffer(), torch.zeros(4, dtype=torch.int64)

    def body() -> None:
        router(IDS)
        buffer.low_latency_dispatch(X, None, 8, 4, None, own)
        buffer.low_latency_combine(X, None, None, None, combine_wait_recv_cost_stats=own)

    assert run_step(recording, body) == ()
    assert run_step(recording, body) == ()
    assert all(tensor is own for tensor in buffer.given)
    assert own.tolist() == (WAITS * 6).tolist()


def test_nothing_is_passed_outside_of_recorded_steps_or_unasked(record: Make, package: Any) -> None:
    """The caller's call is then the caller's own."""
    recording, _ = instrumented(record)
    buffer = package.Buffer()
    exchange(buffer)
    assert buffer.given == [None] * 3
    recording.tracer.shutdown()
    plain, router = instrumented(record, wait_stats=False)
    assert run_step(plain, lambda: (router(IDS), exchange(buffer))) == ()
    assert buffer.given == [None] * 6


@pytest.mark.parametrize("size", [None, "four", 0])
def test_a_buffer_that_does_not_say_its_ranks_is_left_alone(record: Make, package: Any, size: object) -> None:
    """A tensor of the wrong size would be an error of the kernel's."""
    recording, router = instrumented(record)
    package.Buffer.group_size = size
    buffer = package.Buffer()
    assert run_step(recording, lambda: (router(IDS), exchange(buffer))) == ()
    assert buffer.given == [None] * 3


def test_buffers_without_the_parameter_are_called_as_they_are(record: Make, package: Any) -> None:
    """ElasticBuffer sums no waits."""
    recording, router = instrumented(record)
    assert run_step(recording, lambda: (router(IDS), package.ElasticBuffer().dispatch(X))) == ()
    assert recording.tracer.guard.errors == {}


def test_replays_of_a_graph_add_to_the_step_that_they_are_in() -> None:
    """Zeroed when the step begins, whatever was replayed before it; the address is the captured one."""
    buffer = Buffer()
    tensor = wait_stats.tensor_of((buffer, X))
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
    assert wait_stats.tensor_of((buffer, X)) is tensor


def test_steps_without_such_calls_tell_no_waits(record: Make, package: Any) -> None:
    """Missing is missing, and not zero."""
    recording, router = instrumented(record)
    buffer = package.Buffer()
    run_step(recording, lambda: (router(IDS), exchange(buffer)))
    assert run_step(recording, lambda: router(IDS)) == ()
