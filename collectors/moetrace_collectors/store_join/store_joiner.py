"""Judges the steps of a store one after the other, and writes what a collector would have written.

One process at a time: the engine's memory of calm steps is in it. When it starts it judges the newest judged
steps again, without writing, so that its memory is not empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from moetrace_collectors.errors import UsageError
from moetrace_collectors.receipts import group_violations
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse_rows import TableRows, verdict_rows
from moetrace_collectors.store import first_line
from moetrace_collectors.store_clock import HOUR_MS, NOW
from moetrace_collectors.store_errors import is_retryable, store_answers
from moetrace_collectors.store_join import queries
from moetrace_collectors.store_join.closed_steps import ClosedStep, closed_steps, joined_step
from moetrace_collectors.store_join.rank_rows import StoredRows, rank_steps_of_rows
from moetrace_collectors.summary import layer_loads
from moetrace_collectors.verdict.engine import VerdictEngine

STEPS_AT_ONCE = 16
"""Steps read and written together; bounds memory."""
STEPS_PER_QUESTION = 1_000
"""Step numbers that one query names; a server takes 128 KiB in one parameter."""
REMEMBERED_STEPS = 256
"""Judged steps that fill the engine's memory at a start."""
LONGEST_WAIT_S = 30.0
"""Between two turns while the store is away."""
RECENT_MS = 900_000
"""How far back from the last turn rows are looked for, beside the timeout, ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """What a user can choose."""

    database: str
    timeout_s: float = 10.0
    """From a step's first row until it is judged without the missing ranks."""
    look_back_hours: float = 24.0
    """Rows older than this are not looked for; 0 looks at all."""
    run_id: str = ""
    """Only this run; empty: all."""


class StoreJoiner:
    """Joins what is in a store; `turn` does what can be done now."""

    def __init__(
        self,
        client: Any,
        settings: JoinSettings,
        *,
        on_written: Callable[[Sequence[StepResult]], None] = lambda results: None,
        on_lost: Callable[[str, int, str], None] = lambda table, num_rows, reason: None,
    ) -> None:
        """Take a clickhouse-connect client of a migrated store; closed by the caller.

        Args:
            client: of the store.
            settings: what a user chose.
            on_written: told of steps that were judged now, once their rows are in the store.
            on_lost: told (table, rows, reason) of rows that the store refuses for good.
        """
        from clickhouse_connect.driver.exceptions import ClickHouseError

        self._error: type[Exception] = ClickHouseError
        self._client = client
        self._settings = settings
        self._on_written = on_written
        self._on_lost = on_lost
        self._unwritten: list[StepResult] = []
        self._unwritten_rows: list[TableRows] = []
        self._engine = VerdictEngine()
        self._done: set[tuple[str, int]] = set()
        self._remembers = False
        self._looked_ms = 0
        self._turned_ms: int | None = None
        """The store's time at the last turn that came to its end."""

    def turn(self, *, go_on: Callable[[], bool] = lambda: True) -> int:
        """Judge and write every step that has closed since the last turn; how many there were.

        Args:
            go_on: asked between batches of steps; False leaves the rest for the next turn.

        Raises:
            UsageError: the store does not answer, or does not take the rows now; the next turn goes on, and
                no step is judged twice.
        """
        with store_answers():
            return self._turn(go_on)

    def _turn(self, go_on: Callable[[], bool]) -> int:
        num_written = self._write()
        closed = self._closed()
        judged = self._judged(closed)
        if not self._remembers:
            self._remember([step for step in closed if (step.run_id, step.step) in judged], go_on)
        waiting = [step for step in closed if (step.run_id, step.step) not in judged]
        self._done |= judged
        for batch in _batches(waiting, STEPS_AT_ONCE):
            if not go_on():
                return num_written
            self._unwritten = self._judge(batch)
            self._unwritten_rows = [rows for rows in verdict_rows(self._unwritten) if len(rows)]
            num_written += self._write()
        self._turned_ms = self._looked_ms
        return num_written

    def _closed(self) -> list[ClosedStep]:
        now_ms = int(self._client.query(NOW).result_rows[0][0])
        timeout_ms = int(self._settings.timeout_s * 1_000)
        look_back_ms = int(self._settings.look_back_hours * HOUR_MS) or now_ms
        if self._turned_ms is not None:
            # Not from now: the store may have been away from here, and not from those who wrote.
            look_back_ms = min(look_back_ms, now_ms - self._turned_ms + RECENT_MS + 2 * timeout_ms)
        self._looked_ms = now_ms
        rows = self._rows(queries.STEPS, {"since_ms": now_ms - look_back_ms, "run": self._settings.run_id})
        closed = closed_steps(rows, now_ms=now_ms, timeout_ms=timeout_ms)
        # What is looked for no more needs no remembering.
        self._done &= {(step.run_id, step.step) for step in closed}
        return [step for step in closed if (step.run_id, step.step) not in self._done]

    def _judged(self, closed: Sequence[ClosedStep]) -> set[tuple[str, int]]:
        found = set()
        by_run = sorted(closed, key=lambda step: (step.run_id, step.step))
        for batch in _batches(by_run, STEPS_PER_QUESTION):
            rows = self._rows(queries.JUDGED, _named(batch))
            found |= {(str(row["run_id"]), int(row["step"])) for row in rows}
        return found

    def _remember(self, judged: Sequence[ClosedStep], go_on: Callable[[], bool]) -> None:
        # A try that failed in the middle has left half a memory.
        self._engine = VerdictEngine()
        for batch in _batches(judged[-REMEMBERED_STEPS:], STEPS_AT_ONCE):
            if not go_on():
                return
            self._judge(batch)
        self._remembers = True

    def _judge(self, batch: Sequence[ClosedStep]) -> list[StepResult]:
        """Read and judge steps of one run, in their order."""
        parameters = _named(batch)
        by_step = rank_steps_of_rows(
            StoredRows(
                records=self._rows(queries.RANK_STEPS, parameters),
                phases=self._rows(queries.PHASES, parameters),
                experts=self._rows(queries.EXPERTS, parameters),
                traffic=self._rows(queries.TRAFFIC, parameters),
                violations=self._rows(queries.VIOLATIONS, parameters),
                waits=self._rows(queries.WAITS, parameters),
            )
        )
        results = []
        for closed in batch:
            if closed.step not in by_step:
                # Its rows have expired since they were counted, or this replica has them not yet.
                continue
            joined = joined_step(closed, by_step[closed.step])
            results.append(
                StepResult(
                    joined=joined,
                    verdict=self._engine.judge(joined),
                    loads=layer_loads(joined),
                    violations=group_violations(joined),
                )
            )
        return results

    def _write(self) -> int:
        """Write what is judged; after a failure the rest. What is refused for good is given up and told."""
        while self._unwritten_rows:
            rows = self._unwritten_rows[0]
            try:
                self._client.insert(
                    rows.table,
                    list(rows.columns),
                    column_names=list(rows.names),
                    database=self._settings.database,
                    column_oriented=True,
                )
            except (self._error, ValueError, TypeError, OverflowError) as error:
                if is_retryable(error):
                    raise
                # The same rows would be refused for ever and hold up every step behind them.
                self._on_lost(rows.table, len(rows), first_line(error))
            self._unwritten_rows.pop(0)
        results, self._unwritten = self._unwritten, []
        self._done |= {(result.joined.run_id, result.joined.step) for result in results}
        if results:
            self._on_written(results)
        return len(results)

    def _rows(self, sql: str, parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        bound = {**parameters, "database": self._settings.database}
        return list(self._client.query(sql, parameters=bound).named_results())


def _named(batch: Sequence[ClosedStep]) -> dict[str, Any]:
    """Steps of one run as parameters of a query."""
    return {"run": batch[0].run_id, "steps": [step.step for step in batch]}


def _batches(steps: Sequence[ClosedStep], size: int) -> list[list[ClosedStep]]:
    """Steps in their order, cut where the run changes and after `size`."""
    batches = []
    for _, of_run in groupby(steps, key=lambda step: step.run_id):
        together = list(of_run)
        batches += [together[start : start + size] for start in range(0, len(together), size)]
    return batches


def join_until(
    joiner: StoreJoiner,
    *,
    stopped: Callable[[float], bool],
    interval_s: float,
    on_turn: Callable[[int], None],
    on_failed: Callable[[UsageError], None],
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Turn after turn until `stopped`, which waits for so many seconds, says so.

    A store that is away is asked again, each time after a longer wait. A turn with much to do ends early
    once `go_on` says no.
    """
    wait_s = interval_s
    while True:
        try:
            on_turn(joiner.turn(go_on=go_on))
            wait_s = interval_s
        except UsageError as error:
            on_failed(error)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        if stopped(wait_s):
            return
