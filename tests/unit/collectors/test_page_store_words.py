"""What the page says when its store does not answer, and how much it asks of it."""

from __future__ import annotations

from typing import Any

import pytest

from moetrace_collectors.page import query_store
from moetrace_collectors.page.query_store import NoAnswerError, QueryStore
from moetrace_collectors.read_only_query import Query, QueryError
from moetrace_collectors.views import browse_reader
from moetrace_collectors.views.browse_reader import MAX_LOAD_ROWS, read_loads
from moetrace_collectors.views.store_rows import STORED_ROWS, Parameters, Row


class FailingRunner:
    """Answers nothing."""

    def __init__(self, error: QueryError) -> None:
        self._error = error

    def run(self, query: Query) -> bytes:
        """See QueryRunner."""
        raise self._error


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (503, "busy with other queries"),
        (504, "ask for fewer steps"),
        (507, "ask for fewer steps"),
        (500, "The store does not answer; what arrives is kept"),
    ],
)
def test_a_failing_store_is_one_plain_sentence(status: int, words: str) -> None:
    """Neither an engine's message nor a traceback reaches the page."""
    error = QueryError("Code: 210. DB::NetException: Connection refused (at 10.0.0.1)", status=status)
    with pytest.raises(NoAnswerError) as raised:
        QueryStore(FailingRunner(error), database="moetrace").rows("SELECT 1", {})
    assert words in str(raised.value)
    assert "DB::" not in str(raised.value)
    assert raised.value.status == 503


class RecordingRunner:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.queries: list[Query] = []

    def run(self, query: Query) -> bytes:
        """See QueryRunner."""
        self.queries.append(query)
        return b'{"number":18446744073709551615}\n'


def test_values_travel_beside_the_text() -> None:
    """A value is escaped as a TSV field, and 64-bit numbers come back whole."""
    runner = RecordingRunner()
    rows = QueryStore(runner, database="moetrace").rows(
        "SELECT {run:String}", {"run": "a\tb\\", "steps": [1, 2]}
    )
    assert rows == [{"number": 18446744073709551615}]
    assert runner.queries[0].parameters == {"database": "moetrace", "run": "a\\tb\\\\", "steps": "[1, 2]"}


def test_sums_are_made_once_while_the_rows_stay() -> None:
    """An answer is remembered by its parameters and the rows behind it, and only where it is asked for so."""
    runner = RecordingRunner()
    store = QueryStore(runner, database="moetrace")
    for stored_rows in ("4 0", "4 0", "5 0", "4 0"):
        assert store.rows("SELECT 1", {"run": "a", STORED_ROWS: stored_rows})
    assert len(runner.queries) == 2
    store.rows("SELECT 1", {"run": "b", STORED_ROWS: "4 0"})
    store.rows("SELECT 1", {"run": "a"})
    store.rows("SELECT 1", {"run": "a"})
    assert len(runner.queries) == 5


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer that was not asked for longest goes first."""
    runner = RecordingRunner()
    store = QueryStore(runner, database="moetrace")
    store.rows("SELECT 1", {STORED_ROWS: "1"})
    size = len(RecordingRunner().run(runner.queries[0]))
    monkeypatch.setattr(query_store, "MAX_REMEMBERED_BYTES", 2 * size)
    for stored_rows in ("2", "1", "3"):
        store.rows("SELECT 1", {STORED_ROWS: stored_rows})
    assert len(runner.queries) == 3
    store.rows("SELECT 1", {STORED_ROWS: "1"})
    assert len(runner.queries) == 3
    store.rows("SELECT 1", {STORED_ROWS: "2"})
    assert len(runner.queries) == 4


class WideStore:
    """A run whose every step holds too many rows to sum many of."""

    address = "wide"
    database = "moetrace"

    def __init__(self, rows_per_step: int) -> None:
        self.rows_per_step = rows_per_step
        self.summed: list[Any] = []

    def rows(self, sql: str, parameters: Parameters) -> list[Row]:
        """See Store."""
        queries = browse_reader.queries
        if sql == queries.NEWEST_MODES:
            return [{"forward_mode": "train", "last_step": 99}]
        if sql == queries.NEWEST_COUNTED:
            limit = parameters["limit"]
            assert isinstance(limit, int)
            return [{"step": 99 - index} for index in range(limit)]
        if sql == queries.LOAD_ROWS:
            return [{"num_rows": self.rows_per_step}]
        if sql == queries.COHORTS:
            return [{"cohorts": []}]
        self.summed.append(parameters["steps"])
        return [{"layer": 0, "place": 0, "total": 1}]


@pytest.mark.parametrize(
    ("rows_per_step", "steps"), [(MAX_LOAD_ROWS // 3, 3), (MAX_LOAD_ROWS * 5, 1), (10, 20)]
)
def test_loads_sum_no_more_steps_than_a_person_waits_for(rows_per_step: int, steps: int) -> None:
    """The wider a step, the fewer of them; the newest always."""
    store = WideStore(rows_per_step)
    sums = read_loads(store, "run", mode=None, num_steps=20)
    assert sums is not None
    assert len(sums.steps) == steps
    assert sums.steps[-1] == 99
    assert store.summed == [list(sums.steps)] * 2
