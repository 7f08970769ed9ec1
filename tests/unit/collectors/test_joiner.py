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
from moetrace_collectors.watermark import Watermarks
from moetrace_schemas.enums import ClosedBy

RUN = SyntheticRun(run_id="r", world_size=3, num_layers=1, num_experts=2)
SECOND = 1_000_000_000


def window(
    *,
    timeout_ns: int = 10 * SECOND,
    max_steps: int = 100,
    max_bytes: int = 2**30,
    max_closed_steps: int = 100,
    watermark_steps: int = 0,
    quorum: float = 0.0,
    quorum_grace_ns: int = 0,
) -> JoinWindow:
    """A window that is wide unless a test narrows it."""
    return JoinWindow(
        timeout_ns=timeout_ns,
        max_steps=max_steps,
        max_bytes=max_bytes,
        max_closed_steps=max_closed_steps,
        watermark_steps=watermark_steps,
        quorum=quorum,
        quorum_grace_ns=quorum_grace_ns,
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
@given(
    deeds=DEEDS, max_steps=st.integers(1, 4), max_closed=st.integers(1, 4), watermark_steps=st.integers(0, 2)
)
def test_every_rank_step_has_one_fate(
    deeds: list[Deed], max_steps: int, max_closed: int, watermark_steps: int
) -> None:
    """Any order, duplicates, gaps, lies and timeouts: the law holds at every moment, and nothing is lost.

    What closed steps hold, plus what was late, duplicate or rejected, is exactly what was given.
    """
    joiner = Joiner(
        window(
            timeout_ns=7,
            max_steps=max_steps,
            max_closed_steps=max_closed,
            watermark_steps=watermark_steps,
            quorum=0.5 if max_closed == 1 else 0.0,
            quorum_grace_ns=3,
        )
    )
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


# --- watermark and quorum ------------------------------------------------------------------------


def closed_steps(outcomes: tuple[Outcome, ...]) -> list[tuple[int, ClosedBy, tuple[int, ...]]]:
    """Steps that closed: number, why, who was missing."""
    return [(one.step, one.closed_by, one.missing_ranks) for one in outcomes if isinstance(one, JoinedStep)]


def test_a_step_closes_when_its_missing_ranks_have_gone_on() -> None:
    """A dropped step waits for so many later steps of the rank that lacks it, and for no clock."""
    joiner = Joiner(window(watermark_steps=2))
    for rank in (0, 2):
        joiner.add(rank_step(10, rank), now_ns=0)
    assert closed_steps(joiner.add(rank_step(20, 1), now_ns=0)) == []
    assert closed_steps(joiner.add(rank_step(20, 1), now_ns=0)) == []  # a duplicate is no later step
    assert closed_steps(joiner.add(rank_step(30, 1), now_ns=0)) == [(10, ClosedBy.WATERMARK, (1,))]
    assert isinstance(joiner.add(rank_step(10, 1), now_ns=0)[0], Late)
    assert law_holds(joiner)


def test_a_dead_rank_is_past_nothing() -> None:
    """However far the others go, a rank that sends nothing is waited for until the timeout."""
    joiner = Joiner(window(watermark_steps=1, timeout_ns=5))
    for step in range(20):
        for rank in (0, 1):
            assert joiner.add(rank_step(step, rank), now_ns=0) == ()
    assert {joined.closed_by for joined in joiner.tick(now_ns=5)} == {ClosedBy.TIMEOUT}


def test_a_microbatch_that_is_expected_is_waited_for() -> None:
    """Ranks that sent one of two microbatches have not sent the step; once all are past it, it closes."""
    joiner = Joiner(window(watermark_steps=1))
    for microbatch in (0, 1):
        for rank in range(3):
            joiner.add(rank_step(0, rank, microbatch), now_ns=0)
    joiner.add(rank_step(1, 0, 1), now_ns=0)
    closed = [closed_steps(joiner.add(rank_step(2, rank), now_ns=0)) for rank in range(3)]
    assert closed == [[], [], [(1, ClosedBy.WATERMARK, (0, 1, 2))]]
    closed = [closed_steps(joiner.add(rank_step(3, rank), now_ns=0)) for rank in range(3)]
    # Step 2 had one microbatch after all, so step 3 is complete with one.
    assert closed == [[], [], [(2, ClosedBy.WATERMARK, ()), (3, ClosedBy.COMPLETE, ())]]


def test_progress_of_ranks_is_bounded() -> None:
    """Beyond the bound the run heard of least recently is forgotten, never the one that is heard."""
    marks = Watermarks(num_steps=1, max_ranks=2)
    assert marks.saw("a", 0, 5)
    assert marks.saw("b", 0, 5)
    assert marks.saw("b", 1, 5)
    assert [marks.mark("a", 0), marks.mark("b", 0), marks.mark("b", 1)] == [-1, 5, 5]
    assert marks.saw("b", 2, 5)
    assert marks.mark("b", 2) == 5


WINDOW_STEPS = 3


@st.composite
def sent(draw: st.DrawFn) -> tuple[set[tuple[int, int]], list[tuple[int, int]]]:
    """(step, rank) that are dropped, and the others in order per rank, ranks interleaved at will."""
    slots = [(step, rank) for step in range(8) for rank in range(3)]
    dropped = draw(st.sets(st.sampled_from(slots), max_size=6))
    queues = [[slot for slot in slots if slot[1] == rank and slot not in dropped] for rank in range(3)]
    turns = draw(st.permutations([rank for rank, queue in enumerate(queues) for _ in queue]))
    return dropped, [queues[rank].pop(0) for rank in turns]


@settings(max_examples=200, deadline=None)
@given(case=sent())
def test_watermarks_lose_nothing_while_ranks_send_in_order(
    case: tuple[set[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    """However ranks interleave, each step closes once, lacking exactly what was dropped, and none is late."""
    dropped, order = case
    joiner = Joiner(window(watermark_steps=WINDOW_STEPS))
    closed = []
    for step, rank in order:
        closed += joiner.add(rank_step(step, rank), now_ns=0)
        assert law_holds(joiner)
    in_time = {joined.step for joined in closed if isinstance(joined, JoinedStep)}
    assert len(in_time) == len(closed)
    # What every missing rank was past had to close by itself.
    for step in range(8):
        missing = [rank for rank in range(3) if (step, rank) in dropped]
        later = [sum(s > step and r == rank for s, r in order) for rank in missing]
        assert (step in in_time) == (all(n >= WINDOW_STEPS for n in later) and len(missing) < 3)
    for joined in (*closed, *joiner.flush()):
        assert isinstance(joined, JoinedStep)
        assert joined.missing_ranks == tuple(r for r in range(3) if (joined.step, r) in dropped)
    assert joiner.counts.late == 0


@settings(max_examples=100, deadline=None)
@given(
    order=st.permutations([(step, rank) for step in range(5) for rank in range(3)]),
    watermark_steps=st.integers(0, 3),
    quorum=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_order_gives_the_same_rows_or_a_counted_difference(
    order: list[tuple[int, int]], watermark_steps: int, quorum: float
) -> None:
    """What a watermark or a quorum closed too early is late, and with it every rank step is there once."""
    joiner = Joiner(window(watermark_steps=watermark_steps, quorum=quorum, quorum_grace_ns=2, max_steps=100))
    got: list[tuple[int, int]] = []
    for now, (step, rank) in enumerate(order):
        outcomes = (*joiner.tick(now_ns=now), *joiner.add(rank_step(step, rank), now_ns=now))
        for outcome in outcomes:
            held = outcome.rank_steps if isinstance(outcome, JoinedStep) else (outcome.rank_step,)
            got += [(one.step, one.rank) for one in held]
        assert law_holds(joiner)
    got += [(one.step, one.rank) for joined in joiner.flush() for one in joined.rank_steps]
    assert sorted(got) == sorted(order)
    assert joiner.counts.joined + joiner.counts.late == len(order)


def test_a_quorum_counts_after_the_grace_time() -> None:
    """Two of three ranks are enough for a half, but not before the grace time has passed."""
    joiner = Joiner(window(quorum=0.5, quorum_grace_ns=4))
    joiner.add(rank_step(0, 0), now_ns=0)
    joiner.add(rank_step(1, 0), now_ns=1)
    joiner.add(rank_step(1, 2), now_ns=1)
    assert joiner.tick(now_ns=4) == ()
    assert closed_steps(joiner.tick(now_ns=5)) == [(1, ClosedBy.QUORUM, (1,))]
    assert joiner.num_open_steps == 1


def test_a_quorum_needs_whole_ranks() -> None:
    """Two microbatches of one rank are not two ranks, and a rank that lacks one does not count."""
    joiner = Joiner(window(quorum=0.6, quorum_grace_ns=0))
    for rank, microbatch in ((0, 0), (0, 1), (1, 0)):
        joiner.add(rank_step(0, rank, microbatch), now_ns=0)
    assert joiner.tick(now_ns=1) == ()
    joiner.add(rank_step(0, 1, 1), now_ns=1)
    assert closed_steps(joiner.tick(now_ns=1)) == [(0, ClosedBy.QUORUM, (2,))]
