"""The expert-parallel group of hand-written code: learned from its own exchange, and from nothing else."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from moetrace.context import RankContext
from moetrace.guard import Guard
from moetrace.instrument.learn_group import TRIES, GroupLearner

CONTEXT = RankContext(run_id="r", rank=2, world_size=4, ep_rank=0, ep_size=1, ep_group=2, host_name="h")


class Tracer:
    """Where this rank is said to be."""

    def __init__(self, context: RankContext = CONTEXT) -> None:
        self.context, self.guard = context, Guard()

    def set_expert_parallel(self, ep_rank: int, ep_size: int, ep_group: int) -> None:
        """Take the position."""
        self.context = replace(self.context, ep_rank=ep_rank, ep_size=ep_size, ep_group=ep_group)


@pytest.fixture
def ranks() -> Iterator[None]:
    """Rank 2 of four; the others are made up, and exchanges return at once."""
    distributed.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    distributed.destroy_process_group()


def exchanged(learner: GroupLearner, group: Any = None, *, inside: bool = True) -> torch.Tensor:
    """A wrapped dispatch that runs an all-to-all in a group, or the all-to-all alone."""
    collective = learner.beside(distributed.all_to_all_single)

    def dispatch(rows: torch.Tensor) -> torch.Tensor:
        collective(torch.empty_like(rows), rows, group=group)
        return rows

    call = learner.around(dispatch) if inside else dispatch
    rows = torch.arange(4.0)
    assert call(rows) is rows
    return rows


def place(tracer: Tracer) -> tuple[int, int, int]:
    """(rank in the group, its size, its lowest rank)."""
    return tracer.context.ep_rank, tracer.context.ep_size, tracer.context.ep_group


@pytest.mark.usefixtures("ranks")
def test_the_group_of_a_wrapped_exchange_is_taken() -> None:
    """Of the group that the all-to-all was given, or of all ranks; only the first one counts."""
    tracer = Tracer()
    learner = GroupLearner(tracer)
    exchanged(learner, distributed.new_group([2, 3]))
    assert place(tracer) == (0, 2, 2)
    exchanged(learner)
    assert place(tracer) == (0, 2, 2)
    everyone = Tracer()
    exchanged(GroupLearner(everyone))
    assert place(everyone) == (2, 4, 0)
    assert (tracer.guard.errors, everyone.guard.errors) == ({}, {})


@pytest.mark.usefixtures("ranks")
def test_other_exchanges_and_what_was_said_are_left_alone() -> None:
    """An all-to-all outside of dispatch and combine may be of another parallelism; what init said stands."""
    tracer = Tracer()
    exchanged(GroupLearner(tracer), inside=False)
    assert place(tracer) == (0, 1, 2)
    said = Tracer(replace(CONTEXT, ep_rank=1, ep_size=2, ep_group=0))
    learner = GroupLearner(said)
    assert learner.beside(distributed.all_to_all_single) is distributed.all_to_all_single
    exchanged(learner)
    assert place(said) == (1, 2, 0)


@pytest.mark.usefixtures("ranks")
def test_what_teaches_nothing_is_asked_a_few_times() -> None:
    """The first exchange may be of something else; where none shows a group, watching ends."""
    alone = distributed.new_group([2])
    tracer = Tracer()
    learner = GroupLearner(tracer)
    exchanged(learner, alone)
    exchanged(learner, distributed.new_group([2, 3]))
    assert place(tracer) == (0, 2, 2)
    tracer = Tracer()
    learner = GroupLearner(tracer)
    for _ in range(TRIES):
        assert not learner.done
        exchanged(learner, alone)
    exchanged(learner, distributed.new_group([2, 3]))
    assert (learner.done, place(tracer), tracer.guard.errors) == (True, (0, 1, 2), {})


@pytest.mark.usefixtures("ranks")
def test_a_group_is_known_by_its_name_or_mesh() -> None:
    """Functional collectives take both; of a mesh with several dimensions, one that is named with it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for given, expected in (
        (distributed.new_group([2, 3]).group_name, (0, 2, 2)),
        ((mesh, 0), (1, 2, 0)),
        (mesh["inner"], (0, 2, 2)),
        (mesh, (0, 1, 2)),
        ("no such group", (0, 1, 2)),
    ):
        tracer = Tracer()
        learner = GroupLearner(tracer)

        def collective(*, group: object) -> object:
            return group

        watched = learner.beside(collective)
        assert learner.around(lambda call=watched, group=given: call(group=group))() is given
        assert (place(tracer), tracer.guard.errors) == (expected, {})


@pytest.mark.usefixtures("ranks")
def test_an_exchange_in_two_groups_teaches_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Within a node first and across nodes then: neither is the group; one line says so, once."""
    tracer = Tracer()
    learner = GroupLearner(tracer)
    collective = learner.beside(distributed.all_to_all_single)
    within, across = distributed.new_group([2, 3]), distributed.new_group([0, 2])

    def dispatch(rows: torch.Tensor) -> None:
        for group in (within, across):
            collective(torch.empty_like(rows), rows, group=group)

    call = learner.around(dispatch)
    for _ in range(2):
        call(torch.arange(4.0))
    assert (learner.done, place(tracer), tracer.guard.errors) == (True, (0, 1, 2), {})
    assert caplog.text.count("pass ep_size=... to moetrace.init()") == 1


@pytest.mark.usefixtures("ranks")
def test_a_fault_of_ours_is_counted_and_does_not_come_again() -> None:
    """The model runs on."""
    tracer = Tracer()
    learner = GroupLearner(tracer)
    tracer.set_expert_parallel = None  # type: ignore[method-assign,assignment]  # a fault of ours
    for _ in range(2):
        exchanged(learner)
    assert (learner.done, tracer.guard.errors) == (True, {"expert_parallel": 1})


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))])
def test_a_copy_of_a_wrapped_dispatch_computes_with_its_own_weights(record: Any, copy_of: Any) -> None:
    """Nothing of ours travels with it, on a rank among others whose group nobody told."""
    recording, part = record(world_size=2), nn.Linear(2, 2)
    recording.tracer.wrap(dispatch=part, layer=0)
    copied = copy_of(part)
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.zero_()
    assert not copied(torch.ones(1, 2)).any()
    assert part(torch.ones(1, 2)).any()
    assert "forward" not in vars(copied)


def test_a_tracer_made_before_torch_lets_graphs_be_whole() -> None:
    """`init()` may come first in a program: a wrapped exchange is compiled without a graph break."""
    program = """
import moetrace
tracer = moetrace.init(endpoint="", run_id="r", rank=0, world_size=2)
import sys
assert "torch" not in sys.modules
import torch
dispatch = tracer.wrap(dispatch=lambda rows: rows * 2, layer=0).dispatch
run = torch.compile(dispatch, backend="eager", fullgraph=True)
assert run(torch.ones(2)).tolist() == [2.0, 2.0]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
