"""The expert-parallel group of hand-written code: learned from its own exchange, and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from moetrace.context import RankContext
from moetrace.guard import Guard
from moetrace.instrument.learn_group import GroupLearner

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
def test_what_teaches_nothing_is_not_asked_again() -> None:
    """A group that is only named stays unknown, and a failure of ours is counted; the model runs on."""
    for group, errors in (("by name", {}), (None, {"expert_parallel": 1})):
        tracer = Tracer()
        learner = GroupLearner(tracer)
        if group is None:
            tracer.set_expert_parallel = None  # type: ignore[method-assign,assignment]  # a fault of ours

        def collective(*, group: object) -> object:
            return group

        watched = learner.beside(collective)
        assert learner.around(lambda call=watched, group=group: call(group=group))() is group
        assert place(tracer) == (0, 1, 2)
        assert (learner.done, tracer.guard.errors) == (True, errors)
