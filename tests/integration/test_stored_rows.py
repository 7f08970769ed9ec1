"""What stands in the store is what the ranks sent, value by value."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from integration.collector_process import ROOT, environment
from stored_rows import SELECTED, Row, expected


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    """Rows by table, sorted as texts."""
    done = subprocess.run(
        [sys.executable, "-m", "stored_rows", str(tmp_path_factory.mktemp("rows") / "store")],
        cwd=ROOT / "tests",
        env={**environment(), "TZ": "UTC"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {table: sorted(map(tuple, rows)) for table, rows in json.loads(done.stdout).items()}


@pytest.mark.parametrize("table", SELECTED)
def test_a_large_table_holds_exactly_what_was_sent(stored: dict[str, list[Row]], table: str) -> None:
    """Packed, sent, decoded and written by columns, every row equals one rendered by hand from the step."""
    rows = expected(table)
    assert len(rows) > 100
    assert stored[table] == rows
