"""A run started again from two jobs under one id, by when its steps were executed. Pure."""

from __future__ import annotations

from moetrace_collectors.store_join.executions import MAX_BEGUN, ExecutedAgain, ExecutionWatch

SECOND = 1_000_000_000
MINUTE = 60 * SECOND


def again(step: int, *starts_s: float, run_id: str = "r", rank: int = 0) -> ExecutedAgain:
    """A step that was executed at these times."""
    return ExecutedAgain(
        run_id=run_id,
        step=step,
        rank=rank,
        microbatch=0,
        starts=tuple(int(start * SECOND) for start in starts_s),
        stored_ms=7,
    )


def said(watch: ExecutionWatch, *steps: ExecutedAgain) -> list[str]:
    """Reasons of what is to be said."""
    return [notice.reason for step in steps if (notice := watch.saw(step)) is not None]


def test_a_run_that_goes_on_from_a_checkpoint_is_one_that_was_started_again() -> None:
    """However many steps it repeats, in whatever order they are seen, and within a minute."""
    watch = ExecutionWatch()
    steps = [again(step, step, 30 + step) for step in range(10)]
    assert said(watch, *steps[5:], *reversed(steps[:5])) == ["executed_again"]
    assert not watch.is_shared("r", 40 * SECOND)


def test_started_again_and_again_is_not_two_jobs() -> None:
    """Three runs under one id, each some minutes after the other."""
    watch = ExecutionWatch()
    first = [again(step, step, 300 + step) for step in range(8, 10)]
    second = [again(step, 300 + step, 600 + step) for step in range(12, 15)]
    assert said(watch, *first, *second) == ["executed_again", "executed_again"]
    assert not watch.is_shared("r", 620 * SECOND)


def test_two_jobs_are_said_once_and_end_a_minute_after_one_of_them() -> None:
    """Steps that take turns: as long as they do, a step may be of both."""
    watch = ExecutionWatch()
    steps = [again(step, step, step + 0.3) for step in range(200)]
    assert said(watch, *steps) == ["executed_again", "two_jobs"]
    assert watch.is_shared("r", 200 * SECOND)
    assert watch.is_shared("r", 258 * SECOND)
    assert not watch.is_shared("r", 260 * SECOND)
    assert not watch.is_shared("other", 200 * SECOND)


def test_a_restart_after_two_jobs_is_a_restart() -> None:
    """The survivor, started again an hour later, has the id for itself."""
    watch = ExecutionWatch()
    said(watch, *(again(step, step, step + 0.3) for step in range(10)))
    restarted = [again(step, step, step + 0.3, 3_600 + step) for step in range(5)]
    assert "two_jobs" not in said(watch, *restarted)
    assert not watch.is_shared("r", 3_605 * SECOND)


def test_the_same_rows_looked_at_again_say_nothing() -> None:
    """Each look finds what the last one found, and more."""
    watch = ExecutionWatch()
    steps = [again(step, step, step + 0.3) for step in range(3 * MAX_BEGUN)]
    said(watch, *steps)
    assert said(watch, *steps) == []


def test_ranks_that_begin_one_after_the_other_are_one_restart() -> None:
    """Each rank has its own clock; what is said of a run is said once."""
    watch = ExecutionWatch()
    steps = [again(1, 1, 100 + 2 * rank, rank=rank) for rank in range(8)]
    assert said(watch, *steps) == ["executed_again"]
    assert not watch.is_shared("r", 120 * SECOND)
