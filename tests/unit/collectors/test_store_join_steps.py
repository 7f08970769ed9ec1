"""Which steps of a store have closed, and what they are joined to. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moetrace_collectors.joiner import JoinCounts
from moetrace_collectors.stateless_joiner import StatelessJoiner, Unjoined
from moetrace_collectors.store_join.closed_steps import ClosedStep, closed_steps, joined_step
from moetrace_collectors.store_join.step_finder import in_batches
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.enums import ClosedBy

RUN = SyntheticRun(world_size=3, num_layers=1)


def row(step: int, records: int, first_ms: int, last_ms: int, **more: int) -> dict[str, Any]:
    """A row of queries.STEPS."""
    return {
        "run_id": "r",
        "step": step,
        "records": records,
        "world_size": 3,
        "world_sizes": 1,
        "num_microbatches": 1,
        "first_ms": first_ms,
        "last_ms": last_ms,
        "arrivals": 1,
        **more,
    }


def test_steps_close_whole_or_after_the_timeout_in_order_of_closing() -> None:
    """A whole step closes with its last row; an open one when its first row is old enough; others wait.

    So does a whole one that a collector may be about to judge.
    """
    rows = [
        row(1, 2, 1_000, 1_100),
        row(2, 3, 1_200, 1_900),
        row(3, 2, 1_950, 1_960),
        row(4, 3, 1_300, 1_400, num_microbatches=2),
        row(5, 3, 1_100, 1_150, world_sizes=2),
        row(6, 3, 1_100, 1_160, arrivals=0),
        row(7, 3, 1_101, 1_150, arrivals=0),
    ]
    closed = closed_steps(rows, now_ms=2_000, timeout_ms=900)
    assert [(step.step, step.closed_by, step.closed_ms) for step in closed] == [
        (6, ClosedBy.COMPLETE, 1_160),
        (1, ClosedBy.TIMEOUT, 1_900),
        (2, ClosedBy.COMPLETE, 1_900),
        (5, ClosedBy.TIMEOUT, 2_000),
    ]


def test_a_batch_is_of_one_run_and_of_so_many_rank_steps() -> None:
    """What is read together is bounded by its rows, however many ranks a step has; runs do not cut it up."""
    closed = [
        ClosedStep(run_id=run_id, step=step, closed_by=ClosedBy.COMPLETE, closed_ms=step, num_records=records)
        for step, (run_id, records) in enumerate(
            [("a", 4), ("b", 1), ("a", 4), ("b", 1), ("a", 4), ("a", 99), ("b", 1), ("b", 1), ("a", 1)]
        )
    ]
    batches = in_batches(closed, steps=3, records=10)
    assert [[(one.run_id, one.step) for one in batch] for batch in batches] == [
        [("a", 0), ("a", 2)],
        [("b", 1), ("b", 3), ("b", 6)],
        [("a", 4)],
        [("b", 7)],
        [("a", 5)],
        [("a", 8)],
    ]


def test_a_rank_of_another_world_is_left_out() -> None:
    """Most ranks decide; a joiner rejects the others."""
    ranks = RUN.step(0)
    strange = replace(ranks[1], world_size=7)
    closed = ClosedStep(run_id=RUN.run_id, step=0, closed_by=ClosedBy.TIMEOUT, closed_ms=0, num_records=3)
    joined = joined_step(closed, [ranks[2], strange, ranks[0]])
    assert (joined.world_size, joined.missing_ranks, joined.closed_by) == (3, (1,), ClosedBy.TIMEOUT)
    assert [rank_step.rank for rank_step in joined.rank_steps] == [0, 2]


def test_a_rank_without_one_of_its_microbatches_is_missing() -> None:
    """As in the join window: its other rank steps are judged, and it is listed."""
    ranks = RUN.step(0)
    second = [replace(rank_step, microbatch=1) for rank_step in ranks[:2]]
    closed = ClosedStep(run_id=RUN.run_id, step=0, closed_by=ClosedBy.TIMEOUT, closed_ms=0, num_records=3)
    joined = joined_step(closed, [*ranks, *second])
    assert joined.missing_ranks == (2,)
    assert len(joined.rank_steps) == 5


def test_a_collector_that_does_not_join_hands_everything_on() -> None:
    """Nothing waits, nothing is a repeat: received == joined at every moment."""
    joiner = StatelessJoiner()
    first = RUN.step(0)[0]
    for _ in range(2):
        assert joiner.add(first, now_ns=0) == (Unjoined(rank_step=first),)
    assert joiner.counts == JoinCounts(received=2, joined=2)
    assert (joiner.tick(now_ns=10**18), joiner.flush()) == ((), ())
