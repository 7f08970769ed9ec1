"""What comes when a step is over: stragglers, resends, microbatches, restarted ranks, run ids used again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors.incarnations import MAX_INCARNATIONS, Incarnations, stored_run_id
from moetrace_collectors.joiner import Duplicate, Joiner, JoinWindow, Late, Outcome
from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.enums import ClosedBy

RUN = SyntheticRun(run_id="r", world_size=3, num_layers=1, num_experts=2)
SECOND = 1_000_000_000
HOUR = 3_600 * SECOND


def joiner(*, max_closed_steps: int = 100) -> Joiner:
    """A joiner that waits 10 s."""
    return Joiner(
        JoinWindow(timeout_ns=10 * SECOND, max_steps=100, max_bytes=2**30, max_closed_steps=max_closed_steps)
    )


def at(step: int, rank: int, *, later_ns: int = 0, microbatch: int = 0) -> RankStep:
    """One rank's step, started so much later than in the first run."""
    one = RUN.step(step)[rank]
    return replace(one, start_unix_ns=one.start_unix_ns + later_ns, microbatch=microbatch)


def complete(join: Joiner, step: int, *, later_ns: int = 0, now_ns: int = 0) -> JoinedStep:
    """Give all ranks of a step."""
    outcomes: list[Outcome] = []
    for rank in range(3):
        outcomes += join.add(at(step, rank, later_ns=later_ns), now_ns=now_ns)
    (joined,) = outcomes
    assert isinstance(joined, JoinedStep)
    return joined


def run_ids(outcomes: tuple[Outcome, ...]) -> list[str]:
    """Run ids under which something came out."""
    return [one.run_id if isinstance(one, JoinedStep) else one.rank_step.run_id for one in outcomes]


# --- a run id used again -------------------------------------------------------------------------


def test_a_second_run_under_one_id_is_joined_under_its_own_name() -> None:
    """Its steps neither vanish as duplicates nor mix with the first run's, whichever it has."""
    join = joiner()
    for step in range(3):
        assert complete(join, step).run_id == "r"
    for step in range(5):
        joined = complete(join, step, later_ns=HOUR)
        assert (joined.run_id, joined.closed_by) == ("r:2", ClosedBy.COMPLETE)
        assert {one.sent_run_id for one in joined.rank_steps} == {"r"}
    assert complete(join, 0, later_ns=2 * HOUR).run_id == "r:3"
    assert join.counts.duplicate == 0


def test_a_resend_of_the_first_run_stays_a_duplicate_after_the_second_has_begun() -> None:
    """The start time says which run a rank step belongs to."""
    join = joiner()
    complete(join, 0)
    complete(join, 0, later_ns=HOUR)
    (outcome,) = join.add(at(0, 1), now_ns=0)
    assert isinstance(outcome, Duplicate)
    assert outcome.rank_step.run_id == "r"
    (outcome,) = join.add(at(0, 1, later_ns=HOUR), now_ns=0)
    assert isinstance(outcome, Duplicate)
    assert outcome.rank_step.run_id == "r:2"


def test_ranks_of_the_second_run_find_each_other_though_one_began_earlier() -> None:
    """The rank whose first step started first does not have to be the one whose data comes first."""
    join = joiner()
    complete(join, 0)
    assert join.add(at(0, 2, later_ns=HOUR + 5 * SECOND), now_ns=0) == ()
    assert join.add(at(0, 0, later_ns=HOUR), now_ns=0) == ()
    (joined,) = join.add(at(0, 1, later_ns=HOUR + SECOND), now_ns=0)
    assert isinstance(joined, JoinedStep)
    assert (joined.run_id, joined.closed_by) == ("r:2", ClosedBy.COMPLETE)


def test_a_run_that_starts_again_after_its_first_steps_are_forgotten_is_kept_apart() -> None:
    """A step that is no longer remembered still is not mixed with one of an hour later."""
    join = joiner(max_closed_steps=2)
    for step in range(10):
        complete(join, step)
    joined = complete(join, 0, later_ns=HOUR)
    assert (joined.run_id, joined.closed_by) == ("r:2", ClosedBy.COMPLETE)


def test_a_rank_that_was_missing_and_executes_the_step_an_hour_later_is_not_late() -> None:
    """It belongs to the next run, even where it is the first of that run to be heard."""
    join = joiner()
    join.add(at(0, 0), now_ns=0)
    join.tick(now_ns=11 * SECOND)
    assert isinstance(join.add(at(0, 1), now_ns=12 * SECOND)[0], Late)
    assert join.add(at(0, 2, later_ns=HOUR), now_ns=12 * SECOND) == ()
    assert join.num_open_steps == 1


def test_a_rank_that_restarts_and_goes_on_joins_the_others() -> None:
    """A new process of one rank with the same run id and the next step number changes nothing."""
    join = joiner()
    complete(join, 0)
    join.add(at(1, 0), now_ns=0)
    join.add(at(1, 1), now_ns=0)
    (joined,) = join.add(at(1, 2, later_ns=60 * SECOND), now_ns=0)
    assert isinstance(joined, JoinedStep)
    assert (joined.run_id, joined.closed_by) == ("r", ClosedBy.COMPLETE)
    assert complete(join, 2, later_ns=61 * SECOND).run_id == "r"


def test_a_rank_that_restarts_and_counts_from_zero_spoils_no_verdict() -> None:
    """Its old numbers are steps of a new run; the verdicts of the old steps stand."""
    join = joiner()
    for step in range(3):
        complete(join, step)
    assert join.add(at(0, 2, later_ns=60 * SECOND), now_ns=0) == ()
    closed = join.tick(now_ns=11 * SECOND)
    assert [(one.run_id, one.step, one.missing_ranks) for one in closed] == [("r:2", 0, (0, 1))]


@pytest.mark.parametrize("jump_ns", [-HOUR, HOUR])
def test_a_clock_that_jumps_on_one_rank_costs_nothing(jump_ns: int) -> None:
    """New steps join whatever a rank's clock says; a resend is the same bytes and stays a duplicate."""
    join = joiner()
    complete(join, 0)
    for step in range(1, 4):
        join.add(at(step, 0), now_ns=0)
        join.add(at(step, 1), now_ns=0)
        (joined,) = join.add(at(step, 2, later_ns=jump_ns), now_ns=0)
        assert isinstance(joined, JoinedStep)
        assert (joined.run_id, joined.closed_by) == ("r", ClosedBy.COMPLETE)
    (outcome,) = join.add(at(2, 2, later_ns=jump_ns), now_ns=0)
    assert isinstance(outcome, Duplicate)


def test_incarnations_are_bounded() -> None:
    """Two jobs that use one id at the same time make a bounded number of runs, then duplicates."""
    join = joiner()
    for number in range(3 * MAX_INCARNATIONS):
        for rank in range(3):
            join.add(at(0, rank, later_ns=number * HOUR), now_ns=0)
    assert join.counts.duplicate == 3 * 2 * MAX_INCARNATIONS


def test_the_name_of_an_incarnation_is_a_run_id() -> None:
    """It stays within the 128 characters of one."""
    assert stored_run_id("r", 1) == "r"
    assert len(stored_run_id("r" * 128, MAX_INCARNATIONS)) <= 128


def test_a_start_behind_every_cut_belongs_to_the_newest_run() -> None:
    """Cuts are compared with the start, each run from its own on."""
    known = Incarnations()
    assert known.after("r", 1, 100) == 2
    assert known.after("r", 2, 200) == 3
    assert [known.at("r", start) for start in (99, 100, 199, 200)] == [1, 2, 2, 3]
    assert known.at("other", 500) == 1


# --- microbatches --------------------------------------------------------------------------------


def test_a_run_with_microbatches_is_waited_for_from_its_second_step_on() -> None:
    """The first step closes before its second microbatch is heard of; the next ones have both."""
    join = joiner()
    assert complete(join, 0).closed_by is ClosedBy.COMPLETE
    for rank in range(3):
        assert isinstance(join.add(at(0, rank, microbatch=1), now_ns=0)[0], Late)
    outcomes = [join.add(at(1, rank, microbatch=m), now_ns=0) for m in (0, 1) for rank in range(3)]
    assert outcomes[:5] == [()] * 5
    (joined,) = outcomes[5]
    assert isinstance(joined, JoinedStep)
    assert (joined.closed_by, len(joined.rank_steps)) == (ClosedBy.COMPLETE, 6)


def test_a_step_with_fewer_microbatches_closes_by_timeout_once_and_misses_nobody() -> None:
    """Then fewer are expected again."""
    join = joiner()
    for microbatch in (1, 0):
        for rank in range(3):
            join.add(at(0, rank, microbatch=microbatch), now_ns=0)
    for rank in range(3):
        assert join.add(at(1, rank), now_ns=0) == ()
    (joined,) = join.tick(now_ns=10 * SECOND)
    assert (joined.closed_by, joined.missing_ranks) == (ClosedBy.TIMEOUT, ())
    assert complete(join, 2, now_ns=11 * SECOND).closed_by is ClosedBy.COMPLETE


# --- memory that outlives the process --------------------------------------------------------------


def test_a_joiner_that_remembers_treats_what_comes_as_the_old_one_would() -> None:
    """Complete, partial and forgotten steps, late ranks and incarnations come through a restart."""
    old = joiner(max_closed_steps=3)
    for step in range(4):
        complete(old, step)
    old.add(at(4, 0), now_ns=0)
    old.tick(now_ns=11 * SECOND)
    old.add(at(4, 1), now_ns=12 * SECOND)
    complete(old, 3, later_ns=HOUR)
    for new in (joiner(max_closed_steps=3), old):
        if new is not old:
            new.remember(old.all_closed())
        assert isinstance(new.add(at(0, 1), now_ns=13 * SECOND)[0], Late)
        assert isinstance(new.add(at(4, 0), now_ns=13 * SECOND)[0], Duplicate)
        assert isinstance(new.add(at(4, 1), now_ns=13 * SECOND)[0], Duplicate)
        assert isinstance(new.add(at(4, 2), now_ns=13 * SECOND)[0], Late)
        assert run_ids(new.add(at(3, 1, later_ns=HOUR), now_ns=13 * SECOND)) == ["r:2"]


def test_only_what_changed_is_noted() -> None:
    """A note is as large as what has happened since the last one; none where nothing has."""
    join = joiner()
    assert join.take_closed() is None
    for step in range(50):
        complete(join, step)
    whole = join.take_closed()
    complete(join, 50)
    one = join.take_closed()
    assert whole is not None
    assert one is not None
    assert len(one) < 200 < len(whole)
    assert join.take_closed() is None


@settings(max_examples=100, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 1)), max_size=40),
    split=st.integers(0, 40),
)
def test_notes_add_up_to_the_whole_memory(arrivals: list[tuple[int, int, int]], split: int) -> None:
    """Remembering the notes one after the other is remembering everything."""
    join, notes = joiner(max_closed_steps=3), []
    for number, (step, rank, microbatch) in enumerate(arrivals):
        join.add(at(step, rank, microbatch=microbatch), now_ns=number * SECOND)
        join.tick(now_ns=number * SECOND)
        if number == split:
            notes.append(join.take_closed())
    notes.append(join.take_closed())
    new = joiner(max_closed_steps=3)
    for note in notes:
        if note is not None:
            new.remember(note)
    assert new.all_closed() == join.all_closed()


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b'{"format": 2}', b'{"format": 1, "runs": 5}'])
def test_a_memory_that_does_not_read_is_refused(payload: bytes) -> None:
    """Whatever is in its place, it is one ValueError."""
    with pytest.raises(ValueError):
        joiner().remember(payload)


def test_a_late_rank_that_is_sent_once_more_is_a_duplicate() -> None:
    """Though it began later than every rank that came in time: it begins no further run."""
    join = joiner()
    join.add(at(0, 0), now_ns=0)
    join.tick(now_ns=11 * SECOND)
    assert isinstance(join.add(at(0, 1, later_ns=SECOND), now_ns=12 * SECOND)[0], Late)
    (outcome,) = join.add(at(0, 1, later_ns=SECOND), now_ns=13 * SECOND)
    assert isinstance(outcome, Duplicate)
    assert (outcome.rank_step.run_id, outcome.is_resend) == ("r", True)


def test_a_resend_is_told_from_a_step_that_was_executed_again() -> None:
    """By its start, while the step is open, when it has closed, and when there are too many runs."""
    join = joiner()
    join.add(at(0, 0), now_ns=0)
    told = [join.add(at(0, 0, later_ns=later), now_ns=0)[0] for later in (0, -SECOND)]
    assert [one.is_resend for one in told if isinstance(one, Duplicate)] == [True, False]
    for number in range(MAX_INCARNATIONS):
        complete(join, 1, later_ns=number * HOUR)
    outcomes = [
        join.add(at(1, 2, later_ns=hours * HOUR), now_ns=0)[0]
        for hours in (MAX_INCARNATIONS - 1, MAX_INCARNATIONS)
    ]
    assert [one.is_resend for one in outcomes if isinstance(one, Duplicate)] == [True, False]


def test_a_memory_of_the_format_before_is_read() -> None:
    """Without the earliest start nothing is taken for a second job."""
    join = joiner()
    step = '["r",0,3,[0],{},1900000000000000000]'
    runs = '"runs":{"r":[-1,1900000000000000000,1]}'
    join.remember(f'{{"format":1,{runs},"incarnations":{{}},"steps":[{step}]}}'.encode())
    (outcome,) = join.add(replace(at(0, 1), start_unix_ns=1), now_ns=0)
    assert isinstance(outcome, Duplicate)
    assert outcome.is_resend
