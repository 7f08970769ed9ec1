"""Roll-ups by minute are right however often and in whatever batches rows come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration.collector_process import collector, rows, run_script
from moetrace_collectors.testing import SyntheticRun, request

ROLL_UPS = ("expert_load_minutes", "phase_minutes", "exchange_minutes")
STAGES = ("first", "third", "fourth")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What redelivered_store saw."""
    store = tmp_path_factory.mktemp("redelivered") / "store"
    found: dict[str, Any] = json.loads(run_script("redelivered_store", store))
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ROLL_UPS)
def test_a_roll_up_is_what_its_table_sums_to(told: dict[str, Any], stage: str, name: str) -> None:
    """Behind every delivery each row of a roll-up is the sum over the table's rows, each taken once."""
    compared = told[stage][name]
    assert len(compared["rolled_up"]) >= 8
    assert compared["rolled_up"] == compared["summed"]


def test_rows_came_twice_and_minutes_grew(told: dict[str, Any]) -> None:
    """The comparison is about something: rows came twice, and minutes that were rolled up before grew."""
    assert told["second"] == {"delivered": 2 * (3 * 20) + 3 * 30 - 1, "kept": [["149"]]}
    for name in ROLL_UPS:
        # The second process went on where the first had begun: the last of its minutes had grown.
        assert told["third"][name]["rolled_up"] != told["first"][name]["rolled_up"]
    assert told["third"]["turned"] == 2


def test_only_what_is_new_is_summed_again(told: dict[str, Any]) -> None:
    """All came a third time: the one minute with a rank that had been missing is rolled up again."""
    assert told["fourth"]["turned"] == 1
    assert told["nothing left"] == 0
    before, after = told["third"]["phase_minutes"]["rolled_up"], told["fourth"]["phase_minutes"]["rolled_up"]
    assert {row[0] for row, other in zip(after, before, strict=True) if row != other} == {after[0][0]}


def test_a_collector_that_is_killed_counts_what_it_replays_once(tmp_path: Path) -> None:
    """Kill -9 behind a resend, start, resend again, stop: the roll-ups are those of rows without repeats."""
    run = SyntheticRun(run_id="killed", world_size=2, num_layers=2)
    for ending in ("kill", "terminate"):
        with collector(tmp_path) as process:
            for step in range(6):
                assert process.send(request(run.step(step))).status == 200
            process.wait_for("moetrace_collector_pending", 0)
            if ending == "kill":
                process.process.kill()
                process.process.wait()
            else:
                assert process.terminate() == 0
    [sums] = rows(
        tmp_path,
        "SELECT (SELECT sum(count) FROM expert_load_minutes) AS pairs, "
        "(SELECT sum(count) FROM expert_loads FINAL) AS pairs_of_rows, "
        "(SELECT (sum(intervals), sum(duration_ns)) FROM phase_minutes) AS spans, "
        "(SELECT (count(), sum(duration_ns)) FROM phase_spans FINAL) AS spans_of_rows, "
        "(SELECT (sum(exchanges), sum(transfer_ns)) FROM exchange_minutes) AS exchanges, "
        "(SELECT (count(), sum(transfer_ns)) FROM step_barriers FINAL "
        "WHERE phase != 'outside') AS exchanges_of_rows",
    )
    assert sums["pairs"] == sums["pairs_of_rows"] != "0"
    assert sums["spans"] == sums["spans_of_rows"]
    assert sums["exchanges"] == sums["exchanges_of_rows"]
