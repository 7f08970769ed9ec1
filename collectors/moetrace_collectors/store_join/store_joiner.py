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
from moetrace_collectors.model import StepVerdict
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse_rows import verdict_rows
from moetrace_collectors.store import first_line
from moetrace_collectors.store_join import queries
from moetrace_collectors.store_join.closed_steps import ClosedStep, closed_steps, joined_step
from moetrace_collectors.store_join.rank_rows import rank_steps_of_rows
from moetrace_collectors.verdict.engine import VerdictEngine

STEPS_AT_ONCE = 16
"""Steps read and written together; bounds memory."""
REMEMBERED_STEPS = 256
"""Judged steps that fill the engine's memory at a start."""
HOUR_MS = 3_600_000
RECENT_MS = 900_000
"""How far back rows are looked for after the first turn, beside the timeout, ms."""


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

    def __init__(self, client: Any, settings: JoinSettings) -> None:
        """Take a clickhouse-connect client of a migrated store; closed by the caller."""
        from clickhouse_connect.driver.exceptions import ClickHouseError

        self._error: type[Exception] = ClickHouseError
        self._client = client
        self._settings = settings
        self._engine = VerdictEngine()
        self._done: set[tuple[str, int]] = set()
        self._remembers = False

    def turn(self) -> int:
        """Judge and write every step that has closed since the last turn; how many there were.

        Raises:
            UsageError: the store does not answer, or does not take the rows.
        """
        try:
            return self._turn()
        except self._error as error:
            raise UsageError(f"the store does not answer: {first_line(error)}") from error

    def _turn(self) -> int:
        closed = self._closed()
        judged = self._judged(closed)
        if not self._remembers:
            self._remember([step for step in closed if (step.run_id, step.step) in judged])
        waiting = [step for step in closed if (step.run_id, step.step) not in judged]
        for batch in _batches(waiting):
            self._write(self._judge(batch))
        self._done |= judged | {(step.run_id, step.step) for step in waiting}
        return len(waiting)

    def _closed(self) -> list[ClosedStep]:
        now_ms = int(self._client.query(queries.NOW).result_rows[0][0])
        timeout_ms = int(self._settings.timeout_s * 1_000)
        look_back_ms = int(self._settings.look_back_hours * HOUR_MS) or now_ms
        if self._remembers:
            look_back_ms = min(look_back_ms, RECENT_MS + 2 * timeout_ms)
        rows = self._rows(queries.STEPS, {"since_ms": now_ms - look_back_ms, "run": self._settings.run_id})
        closed = closed_steps(rows, now_ms=now_ms, timeout_ms=timeout_ms)
        # What is looked for no more needs no remembering.
        self._done &= {(step.run_id, step.step) for step in closed}
        return [step for step in closed if (step.run_id, step.step) not in self._done]

    def _judged(self, closed: Sequence[ClosedStep]) -> set[tuple[str, int]]:
        if not closed:
            return set()
        rows = self._rows(queries.JUDGED, {"steps": [(step.run_id, step.step) for step in closed]})
        return {(str(row["run_id"]), int(row["step"])) for row in rows}

    def _remember(self, judged: Sequence[ClosedStep]) -> None:
        self._remembers = True
        for batch in _batches(judged[-REMEMBERED_STEPS:]):
            self._judge(batch)

    def _judge(self, batch: Sequence[ClosedStep]) -> list[StepResult]:
        """Read and judge steps of one run, in their order."""
        parameters = {"run": batch[0].run_id, "steps": [step.step for step in batch]}
        by_step = rank_steps_of_rows(
            self._rows(queries.RANK_STEPS, parameters),
            self._rows(queries.PHASES, parameters),
            self._rows(queries.EXPERTS, parameters),
        )
        results = []
        for closed in batch:
            joined = joined_step(closed, by_step[closed.step])
            verdict: StepVerdict = self._engine.judge(joined)
            results.append(StepResult(joined=joined, verdict=verdict, loads=()))
        return results

    def _write(self, results: Sequence[StepResult]) -> None:
        # Barriers first: a step counts as judged once its verdict is there.
        for rows in reversed(verdict_rows(results)):
            if len(rows):
                self._client.insert(
                    rows.table,
                    list(rows.columns),
                    column_names=list(rows.names),
                    database=self._settings.database,
                    column_oriented=True,
                )

    def _rows(self, sql: str, parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        bound = {**parameters, "database": self._settings.database}
        return list(self._client.query(sql, parameters=bound).named_results())


def _batches(steps: Sequence[ClosedStep]) -> list[list[ClosedStep]]:
    """Steps in their order, cut where the run changes and after STEPS_AT_ONCE."""
    batches = []
    for _, of_run in groupby(steps, key=lambda step: step.run_id):
        together = list(of_run)
        batches += [
            together[start : start + STEPS_AT_ONCE] for start in range(0, len(together), STEPS_AT_ONCE)
        ]
    return batches


def join_until(
    joiner: StoreJoiner,
    *,
    stopped: Callable[[float], bool],
    interval_s: float,
    on_turn: Callable[[int], None],
) -> None:
    """Turn after turn until `stopped`, which waits for so many seconds, says so."""
    while True:
        on_turn(joiner.turn())
        if stopped(interval_s):
            return
