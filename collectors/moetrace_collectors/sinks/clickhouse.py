"""Rows into ClickHouse: buffered, columnar, table by table. The embedded engine and a server alike.

A flush turns the buffer into rows, a batch's worth at a time, and keeps those until each table has
taken its own, so that an error in the middle neither loses nor repeats a table, and a step of many
ranks, whose rows take ten times its memory, never lies in memory as rows all at once. Repeats across
flushes (a sender's retry) carry the same keys and replace each other in the store.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moetrace_collectors.errors import SinkError
from moetrace_collectors.events import CollectorEvent
from moetrace_collectors.joiner import size_bytes
from moetrace_collectors.model import RankStep
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse_columns import TableColumns
from moetrace_collectors.sinks.clickhouse_rows import (
    NS_PER_MS,
    TableRows,
    event_rows,
    rank_step_rows,
    unjoined_rows,
    verdict_rows,
)
from moetrace_collectors.store import first_line
from moetrace_collectors.store_errors import is_retryable

INSERT_SETTINGS = {"max_partitions_per_insert_block": 0, "optimize_on_insert": 0}
"""A rank with a wrong date must not make the whole batch fail. Repeats of a key are rare in one batch, and
readers must cope with repeats across batches anyway: to look for them costs half of an insert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """What will become rows."""

    render: Callable[[], Sequence[TableColumns | TableRows]]
    table: str
    """The one that counts its records."""
    number: int


def in_pieces(rank_steps: Sequence[RankStep], piece_bytes: int) -> Iterator[Sequence[RankStep]]:
    """In order, each piece of `piece_bytes` to twice that; what is smaller stays whole.

    A single rank step is never cut.
    """
    piece: list[RankStep] = []
    num_bytes, left = 0, sum(size_bytes(rank_step) for rank_step in rank_steps)
    for rank_step in rank_steps:
        piece.append(rank_step)
        size = size_bytes(rank_step)
        num_bytes, left = num_bytes + size, left - size
        # The rest is no piece of its own where it is small: every insert costs the store a part.
        if num_bytes >= piece_bytes <= left:
            yield piece
            piece, num_bytes = [], 0
    if piece:
        yield piece


class ClickHouseSink:
    """Buffers until it is told to insert."""

    name = "clickhouse"

    def __init__(
        self,
        client: Any,
        *,
        database: str,
        batch_bytes: int,
        on_stored: Callable[[str, int], None],
        on_lost: Callable[[str, int], None],
        on_written: Callable[[Iterable[tuple[str, int]]], None] | None = None,
        unix_ns: Callable[[], int] = time.time_ns,
        insert_arrow: Callable[[str, Any], None] | None = None,
    ) -> None:
        """Take a client of a migrated store.

        Args:
            client: clickhouse-connect client; closed by `close`.
            database: holds the tables.
            batch_bytes: size of the rank steps that are made into rows at once.
            on_stored: told (table, rows) after each insert.
            on_lost: told (table, rows) of rows that the store refuses for good, and (rank_steps, number) or
                the like of what no rows can be made of.
            on_written: told of rank steps, as (run id, start in unix ns), once their rows are in the store
                or given up; None for nobody.
            unix_ns: clock that says when rows were written.
            insert_arrow: inserts (table, Arrow table) a faster way than the client, with the client's errors
                and `INSERT_SETTINGS`; None for the client's own.
        """
        self._client = client
        self._insert_arrow = insert_arrow or self._insert_through_client
        self._database = database
        self._batch_bytes = batch_bytes
        self._on_stored = on_stored
        self._on_lost = on_lost
        self._on_written = on_written
        self._unix_ns = unix_ns
        self._results: list[StepResult] = []
        self._late: list[RankStep] = []
        self._joined: list[RankStep] = []
        self._unjoined: list[RankStep] = []
        self._events: list[CollectorEvent] = []
        self._pieces: deque[_Piece] = deque()
        self._unwritten: list[TableColumns | TableRows] = []
        self._unwritten_starts: set[tuple[str, int]] = set()

    @property
    def _unfinished(self) -> bool:
        return bool(self._unwritten or self._pieces)

    def take_step(self, result: StepResult) -> None:
        """See Writer."""
        self._joined += result.joined.rank_steps
        self.take_verdict(result)

    def take_joined(self, rank_step: RankStep) -> None:
        """See BatchWriter."""
        self._joined.append(rank_step)

    def take_verdict(self, result: StepResult) -> None:
        """See BatchWriter."""
        self._results.append(result)

    def take_unjoined(self, rank_step: RankStep) -> None:
        """See Writer."""
        self._unjoined.append(rank_step)

    def take_late(self, rank_step: RankStep) -> None:
        """See Writer."""
        self._late.append(rank_step)

    def take_event(self, event: CollectorEvent) -> None:
        """See Writer."""
        self._events.append(event)

    def flush(self) -> None:
        """See Writer."""
        if not self._unfinished:
            self._take_buffer()
        while self._unfinished:
            if not self._unwritten:
                self._render_next()
            while self._unwritten:
                self._insert(self._unwritten[0])
                self._unwritten.pop(0)
        starts, self._unwritten_starts = self._unwritten_starts, set()
        if starts and self._on_written is not None:
            self._on_written(starts)

    def abandon(self) -> None:
        """See Writer."""
        self._take_buffer()
        while self._unfinished:
            for rows in self._unwritten:
                self._on_lost(rows.table, len(rows))
            self._unwritten = []
            if self._pieces:
                try:
                    self._render_next()
                except SinkError as error:
                    # What no rows can be made of is counted, too; nobody tries again.
                    if error.retryable:
                        self._give_up(self._pieces.popleft())
        self._unwritten_starts = set()

    def _take_buffer(self) -> None:
        """Plan the rows of what is buffered; verdicts go last, when all that they rest on is there."""
        now_ms = self._unix_ns() // NS_PER_MS
        for steps, render_rows in (
            (self._joined, partial(rank_step_rows, late=False)),
            (self._unjoined, unjoined_rows),
            (self._late, partial(rank_step_rows, late=True)),
        ):
            for piece in in_pieces(steps, self._batch_bytes):
                render = partial(render_rows, piece, received_unix_ms=now_ms)
                self._pieces.append(_Piece(render=render, table="rank_steps", number=len(piece)))
            self._unwritten_starts |= {(step.run_id, step.start_unix_ns) for step in steps}
        results, events = self._results, self._events
        self._unwritten_starts |= {
            (step.run_id, step.start_unix_ns) for result in results for step in result.joined.rank_steps
        }
        self._pieces.append(
            _Piece(render=lambda: (event_rows(events),), table="collector_events", number=len(events))
        )
        self._pieces.append(
            _Piece(render=partial(verdict_rows, results), table="step_verdicts", number=len(results))
        )
        self._joined, self._unjoined, self._late = [], [], []
        self._results, self._events = [], []

    def _render_next(self) -> None:
        piece = self._pieces[0]
        try:
            self._unwritten = [rows for rows in piece.render() if len(rows)]
        except MemoryError as error:
            # Others hold it now: queries, merges, requests. Kept, while senders are told to come back.
            raise SinkError(
                f"{piece.table}: no memory to make rows of {piece.number} records", retryable=True
            ) from error
        except Exception as error:
            # A fault of ours, which the same records would meet again, also when the log replays them: they
            # must not hold up what is behind them. Counted, and said where every failed write is.
            self._give_up(self._pieces.popleft())
            raise SinkError(
                f"{piece.table}: no rows can be made of {piece.number} records: "
                f"{type(error).__name__}: {first_line(error)}",
                retryable=False,
            ) from error
        self._pieces.popleft()

    def _give_up(self, piece: _Piece) -> None:
        self._on_lost(piece.table, piece.number)

    def _insert(self, rows: TableColumns | TableRows) -> None:
        try:
            if isinstance(rows, TableColumns):
                self._insert_arrow(rows.table, rows.arrow)
            else:
                self._client.insert(
                    rows.table,
                    list(rows.columns),
                    column_names=list(rows.names),
                    database=self._database,
                    column_oriented=True,
                    settings=INSERT_SETTINGS,
                )
        except Exception as error:
            # Also what driver and Arrow raise of their own: else it would end the thread that writes.
            retryable = is_retryable(error)
            if not retryable:
                # The same rows would be refused for ever and hold up everything behind them.
                self._unwritten.pop(0)
                self._on_lost(rows.table, len(rows))
            reason = "no memory to insert" if isinstance(error, MemoryError) else first_line(error)
            raise SinkError(f"{rows.table}: {reason}", retryable=retryable) from error
        self._on_stored(rows.table, len(rows))

    def _insert_through_client(self, table: str, arrow: Any) -> None:
        self._client.insert_arrow(table, arrow, database=self._database, settings=INSERT_SETTINGS)
