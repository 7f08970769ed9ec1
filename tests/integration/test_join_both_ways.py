"""A collector that joins, and a join over the store of others that do not: one run, the same results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from integration.collector_process import run_script


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What both_ways saw, by way."""
    found: dict[str, dict[str, Any]] = json.loads(
        run_script("both_ways", tmp_path_factory.mktemp("both") / "store")
    )
    return found


def test_the_ledger_has_the_same_rows(told: dict[str, dict[str, Any]]) -> None:
    """Announced, applied and judged, each once and in the same order, every figure of a comparison alike.

    Though two collectors announce, and the join begins anew before, between and behind the changes.
    """
    assert told["in_store"]["ledger"] == told["online"]["ledger"]
    events = [(row["event"], row["version"], row["verdict"]) for row in told["in_store"]["ledger"]]
    assert events == [
        ("announced", 1, ""), ("announced", 1, ""), ("applied", 1, ""),
        ("announced", 2, ""), ("announced", 2, ""), ("applied", 2, ""), ("judged", 2, "regressed"),
        ("announced", 3, ""), ("announced", 3, ""), ("applied", 3, ""), ("judged", 3, "accepted"),
    ]  # fmt: skip
    judged = next(row for row in told["in_store"]["ledger"] if row["event"] == "judged")
    assert judged["document"]["thresholds"]["max_slowdown"] == 0.05, "as it was announced"


def test_counts_of_slots_are_the_same_counts_of_experts(told: dict[str, dict[str, Any]]) -> None:
    """Row by row, of every kind, also where a collector did not know the map yet."""
    assert told["in_store"]["loads"] == told["online"]["loads"]
    assert told["in_store"]["layers"] == told["online"]["layers"]
    assert {expert for _, _, _, _, expert, _, _ in told["in_store"]["loads"]} == set(range(8))


def test_verdicts_and_series_are_the_same(told: dict[str, dict[str, Any]]) -> None:
    """Loads and violations of the series are those of logical experts, too."""
    assert told["in_store"]["verdicts"] == told["online"]["verdicts"]
    # Announcements are counted by the collectors, and every new process begins at zero.
    both = [
        {name: value for name, value in way["series"].items() if "_placement_" not in name}
        for way in (told["online"], told["in_store"])
    ]
    assert both[0].keys() == both[1].keys()
    assert both[1] == pytest.approx(both[0], rel=1e-9)
    assert any(name.startswith("moetrace_expert_tokens_total") for name in both[1])
