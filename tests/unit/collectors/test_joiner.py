"""The join window keeps its promises for any order of arrival."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors.joiner import (
    Duplicate,
    Joiner,
    JoinWindow,
    Late,
    Outcome,
    WorldSizeMismatch,
    size_bytes,
)
from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.enums import ClosedBy

RUN = SyntheticRun(run_id="r", world_size=3, num_layers=1, num_experts=2)
SECOND = 1_000_000_000


def window(
    *,
    timeout_ns: int = 10 * SECOND,
    max_steps: int = 100,
    max_bytes: int = 2**30,
    max_closed_steps: int = 100,
) -> JoinWindow:
    """A window that is wide unless a test narrows it."""
    return JoinWindow(
        timeout_ns=timeout_ns, max_steps=max_steps, max_bytes=max_bytes, max_closed_steps=max_closed_steps
    )


def rank_step(step: int, rank: int, microbatch: int = 0) -> RankStep:
    """One rank's step of the test run."""
    return replace(RUN.step(step)[rank], microbatch=microbatch)


def only(outcomes: tuple[Outcome, ...]) -> Outcome:
    """The one outcome."""
    assert len(outcomes) == 1
    return outcomes[0]


def law_holds(joiner: Joiner) -> bool:
    """Whether every rank step received has exactly one fate."""
    counts = joiner.counts
    return counts.received == (
        counts.joined + counts.late + counts.duplicate + counts.rejected + counts.pending
    )


def test_a_step_closes_when_its_last_rank_arrives() -> None:
    """A step is complete with the last rank of its world, ranks in ascending order, nobody missing."""
    joiner = Joiner(window())
    assert joiner.add(rank_step(0, 2), now_ns=1) == ()
    assert joiner.add(rank_step(0, 0), now_ns=2) == ()
    joined = only(joiner.add(rank_step(0, 1), now_ns=3))
    assert isinstance(joined, JoinedStep)
    assert [step.rank for step in joined.rank_steps] == [0, 1, 2]
    assert (joined.closed_by, joined.missing_ranks) == (ClosedBy.COMPLETE, ())
    assert joined.last_arrival_monotonic_ns == 3


def test_every_microbatch_seen_needs_every_rank() -> None:
    """A step with two microbatches under way waits for both of every rank."""
    joiner = Joiner(window())
    for rank, microbatch in ((0, 1), (0, 0), (1, 0), (1, 1), (2, 0)):
        assert joiner.add(rank_step(0, rank, microbatch), now_ns=0) == ()
    joined = only(joiner.add(rank_step(0, 2, 1), now_ns=0))
    assert isinstance(joined, JoinedStep)
    assert [(step.rank, step.microbatch) for step in joined.rank_steps] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip


def test_a_dead_rank_costs_its_steps_a_timeout_and_no_more() -> None:
    """Steps of a run whose rank died close by timeout, oldest first, naming that rank as missing."""
    joiner = Joiner(window(timeout_ns=5))
    for step in range(3):
        for rank in (0, 2):
            joiner.add(rank_step(step, rank), now_ns=step)
    assert joiner.tick(now_ns=4) == ()
    closed = joiner.tick(now_ns=6)
    assert [(joined.step, joined.closed_by, joined.missing_ranks) for joined in closed] == [
        (0, ClosedBy.TIMEOUT, (1,)),
        (1, ClosedBy.TIMEOUT, (1,)),
    ]
    assert joiner.num_open_steps == 1


def test_the_oldest_step_is_evicted_when_too_many_are_open() -> None:
    """The window never holds more steps than its bound; the oldest closes early and says so."""
    joiner = Joiner(window(max_steps=2))
    joiner.add(rank_step(0, 0), now_ns=0)
    joiner.add(rank_step(1, 0), now_ns=1)
    evicted = only(joiner.add(rank_step(2, 0), now_ns=2))
    assert isinstance(evicted, JoinedStep)
    assert (evicted.step, evicted.closed_by, evicted.missing_ranks) == (0, ClosedBy.EVICTED, (1, 2))
    assert joiner.num_open_steps == 2


def test_the_oldest_steps_are_evicted_when_memory_is_spent() -> None:
    """Pending rank steps never take more memory than the bound."""
    joiner = Joiner(window(max_bytes=2 * size_bytes(rank_step(0, 0))))
    joiner.add(rank_step(0, 0), now_ns=0)
    joiner.add(rank_step(1, 0), now_ns=1)
    evicted = only(joiner.add(rank_step(2, 0), now_ns=2))
    assert isinstance(evicted, JoinedStep)
    assert (evicted.step, evicted.closed_by) == (0, ClosedBy.EVICTED)


@pytest.mark.parametrize("closed", [False, True])
def test_the_same_rank_twice_is_a_duplicate(closed: bool) -> None:
    """A rank step that came before is a duplicate while its step is open, and after it has closed."""
    joiner = Joiner(window())
    for rank in range(3 if closed else 2):
        joiner.add(rank_step(0, rank), now_ns=0)
    assert isinstance(only(joiner.add(rank_step(0, 1), now_ns=1)), Duplicate)
    assert joiner.counts.duplicate == 1


def test_a_first_arrival_after_the_close_is_late_and_a_second_one_a_duplicate() -> None:
    """A missing rank that comes after the timeout is late once; sent again it is a duplicate."""
    joiner = Joiner(window(timeout_ns=5))
    joiner.add(rank_step(0, 0), now_ns=0)
    joiner.tick(now_ns=5)
    assert isinstance(only(joiner.add(rank_step(0, 1), now_ns=6)), Late)
    assert isinstance(only(joiner.add(rank_step(0, 1), now_ns=7)), Duplicate)
    assert isinstance(only(joiner.add(rank_step(0, 0), now_ns=8)), Duplicate)
    assert (joiner.counts.late, joiner.counts.duplicate) == (1, 2)


def test_a_microbatch_nobody_had_sent_is_late_after_the_close() -> None:
    """A microbatch that shows up after its step closed is late, not a duplicate."""
    joiner = Joiner(window())
    for rank in range(3):
        joiner.add(rank_step(0, rank), now_ns=0)
    assert isinstance(only(joiner.add(rank_step(0, 1, microbatch=1), now_ns=1)), Late)


def test_ranks_that_disagree_on_the_world_size_are_rejected() -> None:
    """The first rank of a step sets its world size; one that says another is turned away."""
    joiner = Joiner(window())
    joiner.add(rank_step(0, 0), now_ns=0)
    outcome = only(joiner.add(replace(rank_step(0, 1), world_size=4), now_ns=1))
    assert isinstance(outcome, WorldSizeMismatch)
    assert (outcome.expected, joiner.counts.rejected) == (3, 1)


def test_flush_closes_everything_because_of_shutdown() -> None:
    """At shutdown what had arrived is joined, oldest first, with its missing ranks."""
    joiner = Joiner(window())
    joiner.add(rank_step(1, 0), now_ns=0)
    joiner.add(rank_step(0, 1), now_ns=1)
    closed = joiner.flush()
    assert [(joined.step, joined.closed_by, joined.missing_ranks) for joined in closed] == [
        (1, ClosedBy.SHUTDOWN, (1, 2)),
        (0, ClosedBy.SHUTDOWN, (0, 2)),
    ]
    assert joiner.counts.pending == 0


def test_memory_of_closed_steps_is_bounded() -> None:
    """Beyond the bound the oldest closed step is forgotten: its straggler is late, and never judged alone."""
    joiner = Joiner(window(max_closed_steps=1))
    for step in range(2):
        for rank in range(3):
            joiner.add(rank_step(step, rank), now_ns=0)
    assert isinstance(only(joiner.add(rank_step(0, 1), now_ns=1)), Late)
    assert joiner.num_open_steps == 0


Deed = tuple[str, int, int, int]
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 4), st.integers(0, 2), st.integers(0, 1)),
        st.tuples(st.just("lie"), st.integers(0, 4), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("tick"), st.integers(1, 8), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(deeds=DEEDS, max_steps=st.integers(1, 4), max_closed=st.integers(1, 4))
def test_every_rank_step_has_one_fate(deeds: list[Deed], max_steps: int, max_closed: int) -> None:
    """Any order, duplicates, gaps, lies and timeouts: the law holds at every moment, and nothing is lost.

    What closed steps hold, plus what was late, duplicate or rejected, is exactly what was given.
    """
    joiner = Joiner(window(timeout_ns=7, max_steps=max_steps, max_closed_steps=max_closed))
    now_ns, given_steps, seen_in_outcomes, joined_keys = 0, 0, 0, []
    for kind, first, rank, microbatch in deeds:
        outcomes: tuple[Outcome, ...]
        if kind == "tick":
            now_ns += first
            outcomes = joiner.tick(now_ns=now_ns)
        else:
            step = rank_step(first, rank, microbatch)
            given_steps += 1
            outcomes = joiner.add(replace(step, world_size=4) if kind == "lie" else step, now_ns=now_ns)
        for outcome in outcomes:
            if isinstance(outcome, JoinedStep):
                seen_in_outcomes += len(outcome.rank_steps)
                joined_keys.append((outcome.step, len(joined_keys)))
            else:
                seen_in_outcomes += 1
        assert law_holds(joiner)
        assert joiner.num_open_steps <= max_steps
    flushed = joiner.flush()
    assert law_holds(joiner)
    assert joiner.counts.pending == 0
    assert joiner.counts.received == given_steps
    assert seen_in_outcomes + sum(len(joined.rank_steps) for joined in flushed) == given_steps


@settings(max_examples=50, deadline=None)
@given(order=st.permutations([(step, rank) for step in range(3) for rank in range(3)]))
def test_the_joined_step_does_not_depend_on_the_order_of_arrival(order: list[tuple[int, int]]) -> None:
    """Whatever the order, each step closes once, complete, with the same ranks in the same order."""
    joiner = Joiner(window())
    closed = [
        outcome
        for step, rank in order
        for outcome in joiner.add(rank_step(step, rank), now_ns=0)
        if isinstance(outcome, JoinedStep)
    ]
    assert sorted(joined.step for joined in closed) == [0, 1, 2]
    for joined in closed:
        assert [step.key for step in joined.rank_steps] == [("r", joined.step, rank, 0) for rank in range(3)]
        assert joined.closed_by is ClosedBy.COMPLETE
