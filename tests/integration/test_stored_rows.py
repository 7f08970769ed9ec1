"""What stands in the store is what the ranks sent, value by value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from integration.collector_process import run_script
from stored_rows import SELECTED, Row, expected

UNKNOWN_TABLE = 60
"""ClickHouse's error."""


@pytest.fixture(scope="module", params=["client", "embedded"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the process that stores them prints, for each way of inserting."""
    store = tmp_path_factory.mktemp("rows") / "store"
    return json.loads(run_script("stored_rows", request.param, store))


@pytest.mark.parametrize("table", SELECTED)
def test_a_large_table_holds_exactly_what_was_sent(stored: Any, table: str) -> None:
    """Packed, sent, decoded and written by columns, every row equals one rendered by hand from the step."""
    rows: list[Row] = expected(table)
    assert len(rows) > 100
    assert sorted(map(tuple, stored["rows"][table])) == rows


def test_an_embedded_insert_fails_as_the_client_does(stored: Any) -> None:
    """With the engine's code, by which the sink tells what to try again."""
    assert stored["error_code"] == UNKNOWN_TABLE
