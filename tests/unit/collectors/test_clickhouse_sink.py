"""The ClickHouse sink loses nothing that can be written, and says what cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pyarrow
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError, DataError, OperationalError

from moetrace_collectors.errors import SinkError
from moetrace_collectors.events import CollectorEvent, EventKind
from moetrace_collectors.joiner import size_bytes
from moetrace_collectors.model import JoinedStep, StepVerdict
from moetrace_collectors.sinks import clickhouse
from moetrace_collectors.sinks.base import RetryPolicy, StepResult, flush_with_retry
from moetrace_collectors.sinks.clickhouse import ClickHouseSink
from moetrace_collectors.sinks.clickhouse_rows import TableRows, verdict_rows
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_schemas.enums import ClosedBy

RUN = SyntheticRun(world_size=2, num_layers=1)


@dataclass
class FakeClient:
    """Takes inserts, or raises the next error of its list."""

    errors: list[Exception | None] = field(default_factory=list)
    tables: list[tuple[str, int]] = field(default_factory=list)
    closed: bool = False
    on_insert: Callable[[], None] = lambda: None

    def insert(self, table: str, data: list[list[Any]], **options: Any) -> None:
        """Take a columnar insert."""
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        assert options["column_oriented"]
        assert len({len(column) for column in data}) == 1
        self.on_insert()
        self.tables.append((table, len(data[0])))

    def insert_arrow(self, table: str, arrow: Any, **options: Any) -> None:
        """Take an Arrow table."""
        self.insert(table, [column.to_pylist() for column in arrow.columns], column_oriented=True)

    def close(self) -> None:
        """Close."""
        self.closed = True


@dataclass
class Books:
    """What the sink reported."""

    stored: list[tuple[str, int]] = field(default_factory=list)
    lost: list[tuple[str, int]] = field(default_factory=list)
    now_ns: int = 0
    written: list[set[tuple[str, int]]] = field(default_factory=list)


def make_sink(client: FakeClient, books: Books, *, batch_bytes: int = 10**9) -> ClickHouseSink:
    """A sink with a fake client and clock."""
    return ClickHouseSink(
        client,
        database="moetrace",
        batch_bytes=batch_bytes,
        on_stored=lambda table, rows: books.stored.append((table, rows)),
        on_lost=lambda table, rows: books.lost.append((table, rows)),
        on_written=lambda starts: books.written.append(set(starts)),
    )


def result(step: int = 0) -> StepResult:
    """A judged step."""
    joined = JoinedStep(
        run_id="synthetic",
        step=step,
        world_size=2,
        rank_steps=RUN.step(step),
        missing_ranks=(),
        closed_by=ClosedBy.COMPLETE,
    )
    return StepResult(joined=joined, verdict=VerdictEngine().judge(joined), loads=())


EVENT = CollectorEvent(time_unix_ms=1, kind=EventKind.STARTED, reason="")
TABLES = ["phase_spans", "expert_loads", "rank_traffic", "rank_steps", "step_barriers", "step_verdicts"]
WITH_EVENTS = [*TABLES[:4], "collector_events", *TABLES[4:]]
"""Verdicts go last."""


def test_one_flush_writes_every_table_once() -> None:
    """A step becomes rows of six tables, an event one row of the seventh."""
    client, books = FakeClient(), Books()
    sink = make_sink(client, books)
    sink.take_step(result())
    sink.take_event(EVENT)
    sink.flush()
    assert [table for table, _ in client.tables] == WITH_EVENTS
    assert client.tables == books.stored
    sink.flush()
    assert len(client.tables) == 7


def test_late_rank_steps_are_stored_as_late() -> None:
    """Rows of a late rank step are written, and only those of its own tables."""
    client, books = FakeClient(), Books()
    sink = make_sink(client, books)
    sink.take_late(RUN.step(0)[1])
    sink.flush()
    assert [table for table, _ in client.tables] == TABLES[:4]


def test_only_what_the_store_joins_arrives_there() -> None:
    """Behind its other rows; where the collector joins nobody looks for it, and the row would only cost."""
    client, books = FakeClient(), Books()
    sink = make_sink(client, books)
    sink.take_unjoined(RUN.step(0)[0])
    sink.flush()
    assert client.tables == [*client.tables[:4], ("rank_step_arrivals", 1)]
    assert [table for table, _ in client.tables[:4]] == TABLES[:4]
    client.tables.clear()
    for rank_step in RUN.step(1):
        sink.take_joined(rank_step)
    sink.flush()
    sink.take_verdict(result(1))
    sink.flush()
    assert [table for table, _ in client.tables] == TABLES


@pytest.mark.parametrize(
    "error",
    [
        OperationalError("connection refused"),
        OSError("disk"),
        DatabaseError("Code: 252. too many parts", code=252),
        DatabaseError("HTTP 502 without a body"),
    ],
)
def test_after_a_passing_error_only_the_rest_is_written(error: Exception) -> None:
    """A table that was written is not written again when a later one failed."""
    client, books = FakeClient(errors=[None, None, error]), Books()
    sink = make_sink(client, books)
    sink.take_step(result())
    with pytest.raises(SinkError) as failure:
        sink.flush()
    assert failure.value.retryable
    sink.flush()
    assert [table for table, _ in client.tables] == TABLES
    assert books.lost == []


@pytest.mark.parametrize(
    "error", [DatabaseError("Code: 16. no such column", code=16), DataError("bad value"), ValueError("x")]
)
def test_rows_refused_for_good_are_counted_and_do_not_block_the_rest(error: Exception) -> None:
    """An error that will not pass costs one table's rows of one batch, counted; the rest is written."""
    client, books = FakeClient(errors=[None, error]), Books()
    sink = make_sink(client, books)
    sink.take_step(result())
    with pytest.raises(SinkError) as failure:
        sink.flush()
    assert not failure.value.retryable
    sink.flush()
    assert [table for table, _ in books.lost] == ["expert_loads"]
    assert [table for table, _ in client.tables] == [table for table in TABLES if table != "expert_loads"]


def test_what_is_abandoned_is_counted() -> None:
    """At the shutdown deadline every row that is left, rendered or not, is counted as lost."""
    client, books = FakeClient(errors=[OSError("away")]), Books()
    sink = make_sink(client, books)
    sink.take_step(result(0))
    with pytest.raises(SinkError):
        sink.flush()
    sink.take_step(result(1))
    sink.abandon()
    assert [table for table, _ in books.lost] == [*TABLES, *TABLES]
    assert books.stored == []


def test_retries_back_off_until_it_works() -> None:
    """Delays grow to a longest one, and every failed attempt is reported."""
    client, books = FakeClient(errors=[OSError("away")] * 4), Books()
    sink = make_sink(client, books)
    sink.take_step(result())
    delays: list[float] = []
    errors: list[str] = []

    def wait(delay: float) -> bool:
        delays.append(delay)
        return True

    policy = RetryPolicy(first_s=1, factor=2, longest_s=3)
    assert flush_with_retry(
        sink, policy=policy, on_error=lambda _, error: errors.append(str(error)), wait=wait
    )
    assert delays == [1, 2, 3, 3]
    assert errors == ["phase_spans: away"] * 4
    assert [table for table, _ in client.tables] == TABLES


def test_retries_end_when_told() -> None:
    """When waiting is over the flush reports that it did not work."""
    sink = make_sink(FakeClient(errors=[OSError("away")] * 4), Books())
    sink.take_step(result())
    assert not flush_with_retry(
        sink, policy=RetryPolicy(), on_error=lambda *_: None, wait=lambda delay: False
    )


def test_a_step_larger_than_a_batch_is_written_in_pieces() -> None:
    """Rows of a wide step go to the store some ranks at a time, each once, its verdict behind all of them.

    An error in between neither loses nor repeats a row.
    """
    wide = SyntheticRun(world_size=16, num_layers=1)
    joined = JoinedStep(
        run_id="synthetic",
        step=0,
        world_size=16,
        rank_steps=wide.step(0),
        missing_ranks=(),
        closed_by=ClosedBy.COMPLETE,
    )
    judged = StepResult(joined=joined, verdict=VerdictEngine().judge(joined), loads=())
    whole = FakeClient()
    sink = make_sink(whole, Books())
    sink.take_step(judged)
    sink.flush()

    batch_bytes = sum(map(size_bytes, joined.rank_steps)) // 4
    pieces, books = FakeClient(errors=[None] * 5 + [OperationalError("away")]), Books()
    sink = make_sink(pieces, books, batch_bytes=batch_bytes)
    sink.take_step(judged)
    with pytest.raises(SinkError):
        sink.flush()
    sink.flush()
    assert [table for table, _ in pieces.tables].count("rank_steps") in (3, 4)
    assert [table for table, _ in pieces.tables][-2:] == TABLES[-2:]
    assert _rows_by_table(pieces.tables) == _rows_by_table(whole.tables) == _rows_by_table(books.stored)


def test_pieces_that_are_given_up_are_counted() -> None:
    """Abandoning counts every row of every piece, written pieces apart."""
    run = SyntheticRun(world_size=16, num_layers=1)
    client, books = FakeClient(errors=[None] * 4 + [OperationalError("away")]), Books()
    sink = make_sink(client, books, batch_bytes=1)
    for rank_step in run.step(0):
        sink.take_late(rank_step)
    with pytest.raises(SinkError):
        sink.flush()
    sink.abandon()
    assert _rows_by_table(client.tables)["rank_steps"] == 1
    assert _rows_by_table(books.lost)["rank_steps"] == 15
    written = list(client.tables)
    sink.flush()
    assert client.tables == written, "nothing is left"


def test_no_event_is_dropped_while_the_store_is_well() -> None:
    """Whoever hands them over bounds a batch; the sink writes what it is given."""
    client, books = FakeClient(), Books()
    sink = make_sink(client, books)
    for _ in range(25_000):
        sink.take_event(EVENT)
    sink.flush()
    assert (client.tables, books.lost) == ([("collector_events", 25_000)], [])


def test_starts_are_told_once_their_rows_are_written() -> None:
    """Rows may wait for hours, stamped as of when they came: who sums them learns of them only then."""
    client, books = FakeClient(errors=[None, OSError("away")]), Books()
    client.on_insert = lambda: books.written.append(set())
    sink = make_sink(client, books)
    sink.take_step(result())
    sink.take_late(RUN.step(3)[1])
    with pytest.raises(SinkError):
        sink.flush()
    sink.flush()
    sink.flush()
    starts = {("synthetic", step.start_unix_ns) for step in (*RUN.step(0), RUN.step(3)[1])}
    assert [told for told in books.written if told] == [starts]
    assert books.written[-1] == starts, "no row goes in behind it"


def test_records_that_no_rows_can_be_made_of_hold_up_nothing() -> None:
    """They are counted and said; the log, which would replay them at every start, can let go of them."""
    client, books = FakeClient(), Books()
    sink = make_sink(client, books)
    good = result()
    bad = replace(good, verdict=cast(StepVerdict, None))
    sink.take_step(bad)
    sink.take_event(EVENT)
    said: list[str] = []
    assert flush_with_retry(
        sink,
        policy=RetryPolicy(),
        on_error=lambda _, error: said.append(str(error)),
        wait=lambda delay: False,
    )
    assert books.lost == [("step_verdicts", 1)]
    assert len(said) == 1
    assert said[0].startswith("step_verdicts: no rows can be made of 1 records: AttributeError")
    assert [table for table, _ in client.tables] == [*TABLES[:4], "collector_events"]
    sink.take_step(bad)
    sink.abandon()
    assert books.lost[1:] == [*client.tables[:4], ("step_verdicts", 1)]


@dataclass
class Scarce:
    """Memory that is there again after some attempts."""

    failures: int
    attempts: int = 0

    def verdict_rows(self, results: Sequence[StepResult]) -> Sequence[TableRows]:
        """As the sink's own, once there is memory."""
        self.attempts += 1
        if self.attempts <= self.failures:
            raise MemoryError
        return verdict_rows(results)


def test_rows_that_no_memory_was_left_for_are_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others hold the memory now: the piece is kept, tried again with back-pressure, and written once."""
    client, books, scarce = FakeClient(), Books(), Scarce(failures=3)
    monkeypatch.setattr(clickhouse, "verdict_rows", scarce.verdict_rows)
    sink = make_sink(client, books)
    sink.take_step(result())
    sink.take_event(EVENT)
    said: list[str] = []
    waited: list[float] = []

    def wait(delay: float) -> bool:
        waited.append(delay)
        return True

    assert flush_with_retry(
        sink, policy=RetryPolicy(), on_error=lambda _, error: said.append(str(error)), wait=wait
    )
    assert said == ["step_verdicts: no memory to make rows of 1 records"] * 3
    assert len(waited) == 3
    assert books.lost == []
    assert [table for table, _ in client.tables] == WITH_EVENTS


def test_an_insert_that_no_memory_was_left_for_is_tried_again() -> None:
    """Arrow's error is a MemoryError, too; no row is lost or written twice."""
    client, books = FakeClient(errors=[None, MemoryError(), pyarrow.lib.ArrowMemoryError("4 GiB")]), Books()
    sink = make_sink(client, books)
    sink.take_step(result())
    said: list[str] = []
    assert flush_with_retry(
        sink, policy=RetryPolicy(), on_error=lambda _, error: said.append(str(error)), wait=lambda delay: True
    )
    assert said == ["expert_loads: no memory to insert"] * 2
    assert (books.lost, [table for table, _ in client.tables]) == ([], TABLES)
    assert books.stored == client.tables


def test_abandoning_ends_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be tried again is counted instead: the stop is out of time."""
    client, books, scarce = FakeClient(), Books(), Scarce(failures=10**9)
    monkeypatch.setattr(clickhouse, "verdict_rows", scarce.verdict_rows)
    sink = make_sink(client, books)
    sink.take_step(result())
    sink.take_event(EVENT)
    sink.abandon()
    assert [table for table, _ in books.lost] == [*TABLES[:4], "collector_events", "step_verdicts"]
    scarce.failures = 0
    sink.flush()
    assert client.tables == [], "nothing is left"


def test_an_error_of_the_driver_itself_is_final() -> None:
    """What neither store nor network said would come again with the same rows."""
    client, books = FakeClient(errors=[KeyError("column")]), Books()
    sink = make_sink(client, books)
    sink.take_event(EVENT)
    with pytest.raises(SinkError) as failure:
        sink.flush()
    assert not failure.value.retryable
    assert books.lost == [("collector_events", 1)]


def _rows_by_table(written: list[tuple[str, int]]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for table, num_rows in written:
        rows[table] = rows.get(table, 0) + num_rows
    return rows
