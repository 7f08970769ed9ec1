"""A store of any earlier version becomes one of this version, and its rows stay what they were."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from integration.collector_process import run_script
from moetrace_schemas.clickhouse.render import ROWS_OF_VIEWS, migrations

VERSIONS = [migration.version for migration in migrations()]
TABLE = re.compile(r"CREATE TABLE IF NOT EXISTS \{database\}\.(\w+) ")
DERIVED = {
    "schema_migrations", "runs", "rolled_up_minutes", "expert_load_minute_rows", "phase_minute_rows",
    "exchange_minute_rows", "join_leases",
}  # fmt: skip
"""Of these the rows come from others, from migrations, or from a `moetrace join` that lives."""
JOINED = {"phase_spans", "expert_loads", "step_barriers"}
"""What roll-ups are summed from."""


@pytest.fixture(scope="module")
def upgrades() -> dict[str, dict[str, Any]]:
    """What upgrade_every_version saw, by database."""
    told: dict[str, dict[str, Any]] = json.loads(run_script("upgrade_every_version", timeout_s=900))
    return told


def test_every_version_gets_what_it_lacks(upgrades: dict[str, dict[str, Any]]) -> None:
    """From each version on, exactly the later migrations are applied, in order."""
    assert list(upgrades) == [f"from_{version:04d}" for version in VERSIONS[1:]]
    for number, found in enumerate(upgrades.values(), start=2):
        assert found["applied"] == VERSIONS[number:]


def test_no_row_changes(upgrades: dict[str, dict[str, Any]]) -> None:
    """Every column that a version had holds the same values after the upgrade, in every table it had."""
    for name, found in upgrades.items():
        assert found["before"], name
        assert found["after"] == found["before"], name
    assert len(upgrades["from_0008"]["before"]) == 7


def test_every_table_has_rows_to_lose(upgrades: dict[str, dict[str, Any]]) -> None:
    """Before the last step of the way all tables that collectors fill held rows; the others are derived."""
    newest = upgrades[f"from_{VERSIONS[-1]:04d}"]
    made = {match[1] for migration in migrations() if (match := TABLE.search(migration.template))}
    made -= set(ROWS_OF_VIEWS)  # once tables, and views now
    assert set(newest["before"]) == made - DERIVED
    assert set(newest["filled"]) == made - {"join_leases"}


def test_old_rows_are_read_by_new_views(upgrades: dict[str, dict[str, Any]]) -> None:
    """Runs are filled from rows that were there; the join in SQL works on rows without the new columns."""
    newest = upgrades[f"from_{VERSIONS[-1]:04d}"]
    assert newest["barriers"][0] == 3 * 5  # steps x (2 layers x 2 exchanges, and the tail)
    for name, found in upgrades.items():
        if "rank_steps" in found["before"]:
            assert found["runs"] == [["upgraded", 3, 2]], name
            assert found["barriers"] == newest["barriers"], name


def test_roll_ups_of_before_are_kept_and_say_that_they_are(upgrades: dict[str, dict[str, Any]]) -> None:
    """Sums in which a repeat counted twice stay, marked, until their minute is rolled up again."""
    newest = upgrades[f"from_{VERSIONS[-1]:04d}"]
    [pairs, is_known], [intervals, *_], [exchanges, *_] = newest["rolled_up"]
    assert (is_known, min(pairs, intervals, exchanges) > 0) == (True, True)
    assert newest["minutes"] == [[0, False], [0, 0, False], [0, 0, False]]
    summing = [name for name in upgrades if "from_0041" <= name < "from_0080"]
    assert len(summing) > 5
    for name in summing:
        doubled = [[2 * sum_ for sum_ in one[:-1]] + [False] for one in newest["rolled_up"]]
        assert upgrades[name]["minutes"] == doubled, name
    for name, found in upgrades.items():
        if found["before"].keys() >= JOINED:
            assert found["rolled_up"] == newest["rolled_up"], name
