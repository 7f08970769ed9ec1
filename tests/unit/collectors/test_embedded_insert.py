"""Errors of the embedded engine as the sink reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chdb
import pyarrow
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from moetrace_collectors.sinks.embedded_insert import EMBEDDED_SETTINGS, EmbeddedInsert
from moetrace_collectors.store_errors import is_retryable


class Failing:
    """A connection of which every query fails."""

    message = ""

    def query(self, sql: str) -> None:
        """Fail."""
        raise RuntimeError(self.message)

    def close(self) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("message", "retryable"),
    [
        ("Code: 243. DB::Exception: not enough space", True),
        ("Code: 53. DB::Exception: type mismatch", False),
        ("Unsupported column of a Python object", False),
    ],
)
def test_an_error_without_a_number_is_final(
    message: str, retryable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is in this process and cannot be away: the same rows would fail for ever."""
    monkeypatch.setattr(Failing, "message", message)
    monkeypatch.setattr(chdb, "connect", lambda path: Failing())
    insert = EmbeddedInsert(tmp_path, database="d", settings=EMBEDDED_SETTINGS)
    rows: Any = pyarrow.table({"a": [1]})
    with pytest.raises(DatabaseError, match=message[:20]) as caught:
        insert("t", rows)
    insert.close()
    assert is_retryable(caught.value) is retryable
