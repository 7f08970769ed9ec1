"""`moetrace join` over a real store: rows that were long on their way, run ids used twice, counts by slot."""

from __future__ import annotations

import json
from typing import Any

import pytest

from integration.collector_process import run_script
from moetrace_collectors.verdict.no_verdict import EXECUTED_AGAIN, TWO_JOBS


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What join_cases saw, by case."""
    found: dict[str, dict[str, Any]] = json.loads(
        run_script("join_cases", tmp_path_factory.mktemp("cases") / "store")
    )
    return found


def test_rows_that_waited_for_hours_are_judged_by_the_next_turn(told: dict[str, dict[str, Any]]) -> None:
    """Steps are found by when the store got them; they wait for their ranks from then on."""
    delayed = told["delayed"]
    assert delayed["turns"] == [1, 1, 0, 1, 0, 0]
    assert delayed["judged"] == [0, 1, 2]
    assert delayed["missing"] == [[0, []], [1, []], [2, []]], "nobody is missing who came a moment later"


def test_while_two_jobs_share_a_run_id_nobody_is_named(told: dict[str, dict[str, Any]]) -> None:
    """Said once, also after a restart; a minute after one has ended, steps are judged."""
    case = told["two_jobs"]
    reasons = list(case["reasons"].values())
    assert reasons[:16] == [f"insufficient: {TWO_JOBS}"] * 16
    assert len(reasons) == 20
    assert not any(TWO_JOBS in reason or EXECUTED_AGAIN in reason for reason in reasons[16:])
    assert case["said"] == ["two_jobs"]
    [[reason, detail]] = case["told"]
    assert reason == "two_jobs"
    assert detail.startswith("two jobs seem to send under run id r at the same time")


def test_a_job_started_again_under_its_run_id_is_judged_on(told: dict[str, dict[str, Any]]) -> None:
    """Only the step that is of both times has no verdict, with the reason; one line and one event."""
    case = told["started_again"]
    mixed = {step for step, reason in case["reasons"].items() if EXECUTED_AGAIN in reason}
    assert mixed == {"5"}
    assert len(case["reasons"]) == 10
    assert not any(TWO_JOBS in reason for reason in case["reasons"].values())
    assert case["said"] == ["executed_again"]
    [[reason, detail]] = case["told"]
    assert reason == "executed_again"
    assert "run id r is used again (rank 0 executed step 3 again)" in detail


def test_rows_that_come_twice_are_no_second_execution(told: dict[str, dict[str, Any]]) -> None:
    """A resend through another collector changes nothing and says nothing."""
    case = told["resent"]
    assert (case["turns"], case["said"], case["told"]) == ([3, 0], [], [])
    assert not any(EXECUTED_AGAIN in reason for reason in case["reasons"].values())


def test_counts_that_waited_for_their_map_come_to_the_others(told: dict[str, dict[str, Any]]) -> None:
    """Also behind the step's verdict, and to another join than judged it; of a version that nobody announced
    they come as they are, and stay so where its map comes later.
    """
    case = told["unfolded"]
    assert case["turns"] == [1, 0, 1, 1, 0, 1, 0]
    assert case["loads"] == {
        "step 0 rank 0": [12, 1, 2],
        "step 0 rank 1": [12, 1, 2],
        "step 1 rank 0": [5, 1, 2, 7],
        "step 1 rank 1": [5, 1, 2, 7],
        "step 2 rank 0": [12, 1, 2],
        "step 2 rank 1": [12, 1, 2],
        "step 3 rank 0": [5, 1, 2, 7],
        "step 3 rank 1": [12, 1, 2],
    }


def test_counts_that_are_zero_throughout_wait_for_nothing(told: dict[str, Any]) -> None:
    """They have no row where they would be written to, so they are not looked for at each start of a join."""
    assert told["nothing_dropped"] == {"turns": [1, 0], "marked": [[0]]}


def test_a_minute_is_rolled_up_again_when_rows_come_behind_a_verdict(told: dict[str, dict[str, Any]]) -> None:
    """Also rows that a collector has had for so long that no roll-up looks for them."""
    assert told["rolled_up"] == {"turns": [1, 0], "minutes": [[[1]], [[2]]]}


def test_a_minute_is_rolled_up_again_when_its_counts_are_folded(told: dict[str, dict[str, Any]]) -> None:
    """It holds no more rank steps than before: those of the collector came while nobody joined."""
    assert told["rolled_up_before_folded"] == {"turns": [1, 0], "sums": [[15], [30]], "left": 0}


def test_counts_that_waited_for_days_are_folded(told: dict[str, dict[str, Any]]) -> None:
    """Beyond the look back of a join that was away: there they would expire, and nobody reads them."""
    assert told["waited_for_days"] == {
        "turns": [1, 0, 0],
        "loads": {"step 0 rank 0": [12, 1, 2], "step 0 rank 1": [12, 1, 2]},
    }


def test_a_site_changes_to_the_join_over_the_store(told: dict[str, dict[str, Any]]) -> None:
    """Steps that its collector judged have no arrival and stay as they are; one without verdict is found.

    Not at once: a collector that still runs may be writing it.
    """
    case = told["switched"]
    assert (case["arrived"], case["turns"], case["judged"]) == ([[0]], [0, 2, 0, 0, 1], [3, 4, 1])


def test_a_join_that_is_killed_writes_each_ledger_row_once(told: dict[str, dict[str, Any]]) -> None:
    """Between the ledger and the verdicts of every batch, and begun anew each time."""
    case = told["killed"]
    assert case["failures"] >= 5
    assert case["judged"] == 160
    assert case["ledger"] == [
        ["applied", 1, 0, ""],
        ["applied", 2, 80, ""],
        ["judged", 2, None, "regressed"],
    ]


def test_a_join_that_is_killed_as_a_placement_begins_compares_it(told: dict[str, dict[str, Any]]) -> None:
    """The ledger says that it has begun, and no step of it has a verdict yet: the next join knows what was
    before.
    """
    assert told["killed_once"] == {
        "failures": 1,
        "judged": 160,
        "ledger": [
            ["applied", 1, 0, ""],
            ["applied", 2, 80, ""],
            ["judged", 2, None, "regressed"],
        ],
    }


def test_of_several_joins_one_is_at_work(told: dict[str, dict[str, Any]]) -> None:
    """The first that lives; who was cut off for half a minute comes last; who leaves is followed at once."""
    assert told["standing_by"] == {
        "first": True,
        "second": False,
        "first again": True,
        "another run only": False,
        "second after a gap": [False, True, False],
        "first when the second has left": True,
        "turns standing by": [0, 0],
        "turn when alone": 1,
        "said": ["standing by"],
    }
