"""A collective ends when its result is there, not when the call returns: real ones, over one gloo rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from moetrace.instrument.wait_handles import handle_of, tensor_handles, work_handles
from moetrace_schemas.columns import RowFlag

from .conftest import Recording
from .intervals import lines

Make = Callable[..., Recording]


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def hooked(record: Make) -> Recording:
    """A tracer that knows torch's collectives."""
    recording = record()
    recording.tracer._installer.functions.hook_collectives()
    return recording


def barriers(recording: Recording) -> list[str]:
    """What the one recorded step shows as exchanges, and how much time they took."""
    (step,) = recording.records()
    return [
        line for line, row in zip(lines(step.phases), step.phases, strict=True) if row.flags & RowFlag.BARRIER
    ]


def test_an_asynchronous_exchange_lasts_until_its_work_was_waited_for(hooked: Recording) -> None:
    """`async_op=True` returns at launch; the 40 ns until the wait are the exchange."""
    rows, received = torch.ones(4), torch.empty(4)
    with hooked.tracer.step(), hooked.tracer.phase("dispatch", layer=0):
        hooked.time.advance(5)
        work = dist.all_to_all_single(received, rows, async_op=True)
        hooked.time.advance(40)
        work.wait()
        hooked.time.advance(7)
    assert barriers(hooked) == ["0 dispatch 5-45 barrier async"]
    assert torch.equal(received, rows)


def test_a_synchronous_exchange_is_one_barrier(hooked: Recording) -> None:
    """The wait inside of it is part of it, and no exchange of its own."""
    with hooked.tracer.step(), hooked.tracer.phase("dispatch", layer=0):
        hooked.time.advance(5)
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        hooked.time.advance(5)
    assert barriers(hooked) == ["0 dispatch 5-5 barrier"]


def test_a_wait_for_another_collective_does_not_end_the_exchange(hooked: Recording) -> None:
    """A gradient's all-reduce that is waited for meanwhile is none of ours."""
    with hooked.tracer.step(), hooked.tracer.phase("dispatch", layer=0):
        work = dist.all_to_all_single(torch.empty(4), torch.ones(4), async_op=True)
        other = dist.all_reduce(torch.ones(1), async_op=True)
        hooked.time.advance(10)
        other.wait()
        hooked.time.advance(20)
        work.wait()
    assert barriers(hooked) == ["0 dispatch 0-30 barrier async"]


def test_a_functional_exchange_lasts_until_its_result_is_used(hooked: Recording) -> None:
    """The first use of the pending tensor is the wait."""
    group = dist.group.WORLD
    with hooked.tracer.step(), hooked.tracer.phase("combine", layer=0):
        pending = functional.all_to_all_single(torch.ones(4), None, None, group)
        hooked.time.advance(25)
        total = (pending + 1).sum()
        hooked.time.advance(5)
    assert barriers(hooked) == ["0 combine 0-25 barrier async"]
    assert total.item() == 8


def test_a_functional_exchange_that_is_used_through_a_view_is_ended_by_it(hooked: Recording) -> None:
    """A view of the pending tensor has another name, and is waited for all the same."""
    with hooked.tracer.step(), hooked.tracer.phase("combine", layer=0):
        pending = functional.all_to_all_single(torch.ones(4), None, None, dist.group.WORLD)
        hooked.time.advance(25)
        pending.view(2, 2) + 1
    assert barriers(hooked) == ["0 combine 0-25 barrier async"]


def test_two_functional_exchanges_in_flight_are_told_apart(hooked: Recording) -> None:
    """Each lasts until its own result is used."""
    with hooked.tracer.step(), hooked.tracer.phase("dispatch", layer=0):
        first = functional.all_to_all_single(torch.ones(4), None, None, dist.group.WORLD)
        hooked.time.advance(10)
        second = functional.all_to_all_single(torch.ones(4), None, None, dist.group.WORLD)
        hooked.time.advance(10)
        second + 1
        hooked.time.advance(10)
        first + 1
    assert [line.rpartition(" barrier")[0] for line in barriers(hooked)] == [
        "0 dispatch 10-20",
        "0 dispatch 30-30",
    ]
    assert not hooked.tracer.guard.errors


def test_what_will_be_waited_for_has_a_handle(hooked: Recording) -> None:
    """A Work object by itself, a pending tensor by the tensor in it, and nothing for what is there."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    assert handle_of(work) in work_handles(work)
    work.wait()
    pending: Any = functional.all_to_all_single(torch.ones(4), None, None, dist.group.WORLD)
    assert handle_of(pending) in tensor_handles(pending)
    assert handle_of(pending) in tensor_handles(pending.elem)
    functional.wait_tensor(pending)
    assert handle_of(torch.ones(1)) == 0
    assert handle_of(None) == 0


def test_ranks_come_from_torch_where_it_knows_them() -> None:
    """An initialised process group says more than a launcher's variables."""
    from moetrace.context import detect

    context = detect(run_id="r", environment={"RANK": "5", "WORLD_SIZE": "9"})
    assert (context.rank, context.world_size) == (0, 1)
