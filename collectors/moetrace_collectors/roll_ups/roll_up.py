"""Rolls minutes up: looks what the tables hold more of than the roll-ups, and sums those minutes again.

A result is kept with the number of rows it was summed from, and of two results for a minute the store keeps
the one from more rows. So it does not matter who rolls up, how often, or whether two do it at once; and rows
that have left the tables (time to live) never make a roll-up smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moetrace_collectors.errors import UsageError
from moetrace_collectors.number_format import count
from moetrace_collectors.roll_ups import queries
from moetrace_collectors.roll_ups.failures import FailedMinutes
from moetrace_collectors.roll_ups.minutes import (
    MINUTE_S,
    Minute,
    MinuteCounts,
    MinutePlan,
    MinuteSpan,
    spans,
    stretches,
)
from moetrace_collectors.store import first_line
from moetrace_collectors.store_clock import HOUR_MS, NOW

FIRST_LOOK_BACK_MS = 24 * HOUR_MS
"""How far back rows are looked for where nobody has rolled up yet: after an upgrade, ms."""
OVERLAP_MS = 900_000
"""Rows of the time before the last turn that are looked at again: clocks of collectors differ from the
store's, and a row is stamped before it is written, ms."""
MINUTES_AT_ONCE = 1_000
"""Minutes of runs that are looked at in one turn; the others wait for the next ones."""
SETTINGS = {
    # One core at most: rows that arrive go first.
    "max_threads": 1,
    "max_insert_threads": 1,
    "max_bytes_before_external_group_by": 1 << 30,
    "max_partitions_per_insert_block": 0,
    # A minute is counted and summed on one replica.
    "load_balancing": "in_order",
    # On a cluster a minute goes where it belongs; a server would otherwise leave sums where rows lie.
    "parallel_distributed_insert_select": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RollUpSettings:
    """How a store is rolled up."""

    database: str
    settle_s: float = 15.0
    """A minute is rolled up when nothing of it has come for so long."""
    longest_s: float = 120.0
    """It is rolled up after so long in any case."""
    look_back_ms: int | None = None
    """Rows written so long ago are looked for at first; 0 looks at all, None from where it was left."""
    run_id: str = ""
    """Only this run; empty: all."""


@dataclass(slots=True)
class _Failed:
    """Minutes that one turn could not roll up."""

    minutes: tuple[Minute, ...] = ()
    reason: str = ""


class RollUp:
    """Rolls up what is in a store; `turn` does what is due now."""

    def __init__(
        self, client: Any, settings: RollUpSettings, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Take a clickhouse-connect client of a migrated store; closed by the caller."""
        from clickhouse_connect.driver.exceptions import ClickHouseError

        self._error: type[Exception] = ClickHouseError
        self._client = client
        self._settings = settings
        self._clock_s = clock_s
        self._plan = MinutePlan(settle_s=settings.settle_s, longest_s=settings.longest_s)
        self._failures = FailedMinutes()
        self._unseen: dict[Minute, None] = {}
        """Minutes to look at, the longest waiting first."""
        self._turned_ms: int | None = None
        self._steps: dict[Minute, tuple[int, int]] = {}

    def turn(
        self,
        *,
        touched: frozenset[Minute] = frozenset(),
        everything: bool = False,
        go_on: Callable[[], bool] = lambda: True,
    ) -> int:
        """Roll up the minutes that are due; how many there were.

        Args:
            touched: minutes to look at, whoever wrote to them; left over ones are looked at again.
            everything: do not wait for minutes to settle.
            go_on: asked between minutes; False leaves the rest for the next turn.

        Raises:
            ClickHouseError: of the driver, where the store does not answer.
            UsageError: it refused some minutes, which are tried again later; all others are done.
        """
        now_ms = self._now_ms()
        to_see = self._written(now_ms) | self._plan.waiting | touched
        if not everything:
            to_see -= self._failures.held_back(self._clock_s())
        self._unseen |= dict.fromkeys(sorted(to_see, key=lambda minute: -minute[1]))
        # Only now: a turn that failed is made up for by the next one.
        self._turned_ms = now_ms
        num_minutes, failed = 0, _Failed()
        while True:
            looked_at = list(self._unseen)[:MINUTES_AT_ONCE]
            for together in stretches(looked_at):
                self._see(together)
            for minute in looked_at:
                del self._unseen[minute]
            num_minutes += self._roll_up_due(now_ms, failed, everything=everything, go_on=go_on)
            if not everything or not self._unseen or not go_on():
                break
        if failed.reason:
            raise UsageError(
                f"{count(len(failed.minutes), 'minute')} could not be rolled up, "
                f"of run {failed.minutes[0][0]} first, and will be tried again: {failed.reason}"
            )
        return num_minutes

    def _roll_up_due(
        self, now_ms: int, failed: _Failed, *, everything: bool, go_on: Callable[[], bool]
    ) -> int:
        now_s = self._clock_s()
        due = set(self._plan.due(now_s=now_s, everything=everything)) - set(failed.minutes)
        if not everything:
            due -= self._failures.held_back(now_s)
        num_minutes = 0
        for span in spans(due, alone=self._failures.minutes):
            if not go_on():
                break
            if self._try(span, now_ms, failed):
                num_minutes += len(span.minutes)
                continue
            if len(span.minutes) == 1:
                continue
            for alone in spans(span.minutes, alone=frozenset(span.minutes)):
                if not go_on():
                    return num_minutes
                num_minutes += self._try(alone, now_ms, failed)
        return num_minutes

    def _try(self, span: MinuteSpan, now_ms: int, failed: _Failed) -> bool:
        try:
            self._roll_up(span, now_ms)
        except (self._error, OSError) as error:
            # A store that is away would fail all the others too, each after a while: then this raises.
            self._now_ms()
            if len(span.minutes) == 1:
                self._failures.failed(span.minutes[0], self._clock_s())
                failed.minutes += span.minutes
                failed.reason = failed.reason or first_line(error)
            return False
        self._failures.done(span.minutes)
        return True

    def _now_ms(self) -> int:
        return int(self._client.query(NOW).result_rows[0][0])

    def _written(self, now_ms: int) -> frozenset[Minute]:
        if self._turned_ms is not None:
            since_ms = self._turned_ms - OVERLAP_MS
        elif self._settings.look_back_ms is not None:
            since_ms = now_ms - (self._settings.look_back_ms or now_ms)
        else:
            number, newest_ms = self._client.query(
                queries.NEWEST, parameters={"database": self._settings.database}
            ).result_rows[0]
            since_ms = int(newest_ms) - HOUR_MS if int(number) else now_ms - FIRST_LOOK_BACK_MS
        rows = self._rows(queries.WRITTEN, {"since_ms": since_ms, "run": self._settings.run_id})
        return frozenset((str(row["run_id"]), int(row["minute"])) for row in rows)

    def _see(self, minutes: frozenset[Minute]) -> None:
        bounds = {
            "first": min(start for _, start in minutes),
            "end": max(start for _, start in minutes) + MINUTE_S,
            "runs": sorted({run_id for run_id, _ in minutes}),
        }
        rank_steps = {_minute(row): row for row in self._rows(queries.RANK_STEPS, bounds)}
        verdicts = {_minute(row): int(row["number"]) for row in self._rows(queries.VERDICTS, bounds)}
        rolled_up = {
            (str(row["run_id"]), int(row["minute_s"])): MinuteCounts(
                rank_steps=int(row["rank_steps"]), verdicts=int(row["verdicts"])
            )
            for row in self._rows(queries.ROLLED_UP, bounds)
        }
        now_s = self._clock_s()
        for minute in minutes:
            row = rank_steps.get(minute)
            there = MinuteCounts(
                rank_steps=0 if row is None else int(row["number"]), verdicts=verdicts.get(minute, 0)
            )
            self._plan.see(minute, there=there, rolled_up=rolled_up.get(minute, MinuteCounts()), now_s=now_s)
            if row is not None:
                self._steps[minute] = (int(row["first_step"]), int(row["last_step"]))
        waiting = self._plan.waiting
        self._failures.done(minutes - waiting)
        self._steps = {minute: steps for minute, steps in self._steps.items() if minute in waiting}

    def _roll_up(self, span: MinuteSpan, now_ms: int) -> None:
        self._sum(queries.ROLL_UP_EXPERT_LOADS, span)
        self._sum(queries.ROLL_UP_EXCHANGES, span)
        for of_phases in spans(self._minutes_of_phases(span)):
            self._sum(queries.ROLL_UP_PHASES, of_phases)
        # Behind the rows: after a crash in between they are summed again, to the same.
        counts = [self._plan.counts(minute) for minute in span.minutes]
        self._client.insert(
            "rolled_up_minutes",
            [
                [span.run_id] * len(counts),
                [start for _, start in span.minutes],
                [there.rank_steps for there in counts],
                [there.verdicts for there in counts],
                [now_ms] * len(counts),
            ],
            column_names=["run_id", "minute", "rank_steps", "verdicts", "rolled_up_at"],
            database=self._settings.database,
            column_oriented=True,
        )
        for minute in span.minutes:
            self._plan.done(minute)

    def _minutes_of_phases(self, span: MinuteSpan) -> set[Minute]:
        """Minutes in which phases of the span's steps begin, but for those that will be rolled up anyway."""
        steps = [self._steps[minute] for minute in span.minutes if minute in self._steps]
        if not steps:
            return set()
        rows = self._rows(
            queries.PHASE_MINUTES,
            {
                "run": span.run_id,
                "first_step": min(first for first, _ in steps),
                "last_step": max(last for _, last in steps),
            },
        )
        touched = {(span.run_id, int(row["minute"])) for row in rows}
        return touched - (self._plan.waiting - set(span.minutes))

    def _sum(self, sql: str, span: MinuteSpan) -> None:
        parameters = {"run": span.run_id, "first": span.first_s, "end": span.end_s}
        self._client.command(
            sql, parameters={**parameters, "database": self._settings.database}, settings=SETTINGS
        )

    def _rows(self, sql: str, parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        bound = {**parameters, "database": self._settings.database}
        return list(self._client.query(sql, parameters=bound, settings=SETTINGS).named_results())


def _minute(row: Mapping[str, Any]) -> Minute:
    return (str(row["run_id"]), int(row["minute"]))
