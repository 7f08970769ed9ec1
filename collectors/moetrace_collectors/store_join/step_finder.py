"""Finds the steps of a store that are to be judged now, by when their rows were stored.

Each look goes back to a quarter of an hour before the last one, by the store's clock, which says when rows
came to it and not when a collector had them: however long rows waited for the store, they are found. The
first look goes back as far as the user wants, also by the collectors' clocks. So does one now and then, for
collectors of an older version that are still at work during an upgrade and note no arrivals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

from moetrace_collectors.store_clock import HOUR_MS
from moetrace_collectors.store_join import queries
from moetrace_collectors.store_join.closed_steps import ClosedStep, closed_steps
from moetrace_collectors.store_join.executions import ExecutedAgain, executed_again
from moetrace_collectors.store_questions import Ask, StepKey, in_questions

REMEMBERED_STEPS = 256
"""Judged steps that fill the engine's memory at a start."""
RECENT_MS = 900_000
"""How far back from the last turn rows are looked for, beside the timeout, ms: a row is stamped before it can
be read, and replicas and their clocks lag."""

WRITTEN_EVERY_MS = 300_000
"""Between two looks by the clocks of the collectors, ms."""
WRITTEN_BEFORE_MS = 60_000
"""How old rows are then at least, ms: a collector that joins writes its verdicts behind them."""

_Step = TypeVar("_Step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What is known of a step before it is read."""

    first_ms: int
    """When the first of its rows was stored, by the store's clock."""
    last_ms: int
    arrivals: int
    """How many have arrived, each execution of a rank step once; 0 where nothing says so but the rows."""

    def has_more_than(self, earlier: Arrived | None) -> bool:
        """Whether rows came since an earlier look, which saw the same or more of the older ones."""
        if earlier is None:
            return True
        return self.arrivals > earlier.arrivals or self.last_ms > earlier.last_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one look found."""

    closed: tuple[ClosedStep, ...]
    """To be judged, in the order in which they closed."""
    judged: tuple[ClosedStep, ...]
    """At the first look: the newest that have a verdict, in the order in which they closed."""
    again: tuple[ExecutedAgain, ...]
    """Steps with new rows that a rank executed more than once, in the order in which that began."""
    grown: tuple[StepKey, ...]
    """Steps that have a verdict and new rows, or rows that this process has not looked after; to be told to
    `done` once that is dealt with."""
    now_ms: int
    """The store's clock."""


class StepFinder:
    """Remembers how far it has looked, and what is done."""

    def __init__(self, ask: Ask, *, timeout_ms: int, look_back_hours: float, run_id: str) -> None:
        """Take the rules.

        Args:
            ask: the store.
            timeout_ms: from a step's first row until it is judged without the missing ranks.
            look_back_hours: how far the first look goes back; 0: over all rows.
            run_id: only this run; empty: all.
        """
        self._ask = ask
        self._timeout_ms = timeout_ms
        self._look_back_ms = int(look_back_hours * HOUR_MS)
        self._run_id = run_id
        self._done: dict[StepKey, Arrived] = {}
        """What had come of steps that have a verdict, as long as a look finds them."""
        self._seen: dict[StepKey, Arrived] = {}
        self._open: dict[StepKey, Arrived] = {}
        """Steps that had no verdict after the last look."""
        self._looked_ms = 0
        self._turned_ms: int | None = None
        """The store's time at the last look after which everything was judged."""
        self._written_ms = 0
        """The store's time at the last look by the collectors' clocks."""

    @property
    def num_remembered(self) -> int:
        """Steps that are remembered beyond a look."""
        return len(self._done) + len(self._open)

    def look(self, now_ms: int, *, remember: bool) -> Found:
        """Ask the store.

        Args:
            now_ms: the store's clock.
            remember: also tell the newest judged steps.
        """
        self._looked_ms = now_ms
        since_ms = self._since_ms(now_ms)
        by_collectors = self._turned_ms is None or not 0 <= now_ms - self._written_ms < WRITTEN_EVERY_MS
        self._seen = seen = self._written(since_ms, now_ms) if by_collectors else {}
        seen.update(self._arrived(since_ms))
        in_window = set(seen)
        for key, waited_for in self._open.items():
            # However long ago it was found: from its first row on.
            arrived = seen.get(key, waited_for)
            seen[key] = replace(arrived, first_ms=min(arrived.first_ms, waited_for.first_ms))
        for key, arrived in seen.items():
            # A clock that was put back, or a collector's that is ahead, must not make a step wait for it.
            if arrived.first_ms > now_ms:
                seen[key] = replace(arrived, first_ms=now_ms)
        # What is looked for no more needs no remembering; a replica that lags may not show it just now, and
        # not its verdict either when it does.
        self._done = {
            key: arrived for key, arrived in self._done.items() if key in seen or arrived.last_ms >= since_ms
        }
        fresh = sorted(key for key, arrived in seen.items() if arrived.has_more_than(self._done.get(key)))
        judged = self._judged(key for key in fresh if key not in self._done)
        # Also those that another process judged, or this one so long ago that it has forgotten them: what
        # came behind the verdict may still lie where no reader looks.
        grown = tuple(key for key in fresh if key in self._done or key in judged)
        waiting = [key for key in fresh if key not in judged and key not in self._done]
        newest: list[StepKey] = []
        if remember:
            newest = sorted(judged, key=lambda key: (seen[key].last_ms, key))[-REMEMBERED_STEPS:]
        again = self._again(fresh)
        there = self._there(waiting)
        # A replica may not have the rows of an arrival yet; in the end they have expired.
        stays = in_window.union(_key(row) for row in there)
        # Also those that have closed: the turn may end before they are judged.
        self._open = {key: seen[key] for key in waiting if key in stays}
        if by_collectors:
            self._written_ms = now_ms
        return Found(
            closed=self._closed(there, now_ms),
            judged=self._closed(self._there(newest), now_ms),
            again=again,
            grown=grown,
            now_ms=now_ms,
        )

    def done(self, keys: Iterable[StepKey]) -> None:
        """These have a verdict."""
        for key in keys:
            self._open.pop(key, None)
            if key in self._seen:
                self._done[key] = self._seen[key]

    def turned(self) -> None:
        """Everything that the last look found was dealt with: the next one need not go back further."""
        self._turned_ms = self._looked_ms

    def _since_ms(self, now_ms: int) -> int:
        look_back_ms = self._look_back_ms or now_ms
        if self._turned_ms is not None:
            # Not from now: the store may have been away from here, and not from those who wrote.
            look_back_ms = min(look_back_ms, now_ms - self._turned_ms + RECENT_MS + 2 * self._timeout_ms)
        return now_ms - look_back_ms

    def _written(self, since_ms: int, now_ms: int) -> dict[StepKey, Arrived]:
        before_ms = None if self._turned_ms is None else now_ms - WRITTEN_BEFORE_MS
        rows = self._ask(queries.WRITTEN, {"since_ms": since_ms, "run": self._run_id})
        written = {_key(row): _arrived(row, arrivals=0) for row in rows}
        return {key: one for key, one in written.items() if before_ms is None or one.last_ms <= before_ms}

    def _arrived(self, since_ms: int) -> dict[StepKey, Arrived]:
        rows = self._ask(queries.ARRIVED, {"since_ms": since_ms, "run": self._run_id})
        return {_key(row): _arrived(row, arrivals=int(row["arrivals"])) for row in rows}

    def _judged(self, keys: Iterable[StepKey]) -> set[StepKey]:
        return {
            (run_id, int(row["step"]))
            for run_id, steps in in_questions(keys)
            for row in self._ask(queries.JUDGED, {"run": run_id, "steps": steps})
        }

    def _again(self, keys: Collection[StepKey]) -> tuple[ExecutedAgain, ...]:
        found = [
            executed_again(run_id, row, stored_ms=self._seen[run_id, int(row["step"])].last_ms)
            for run_id, steps in in_questions(keys)
            for row in self._ask(queries.EXECUTED_AGAIN, {"run": run_id, "steps": steps})
        ]
        return tuple(sorted(found, key=lambda one: (one.starts[1], one.run_id, one.step)))

    def _there(self, keys: Collection[StepKey]) -> list[Mapping[str, Any]]:
        return [
            {
                **row,
                "run_id": run_id,
                "first_ms": arrived.first_ms,
                "last_ms": arrived.last_ms,
                "arrivals": arrived.arrivals,
            }
            for run_id, steps in in_questions(keys)
            for row in self._ask(queries.STEPS, {"run": run_id, "steps": steps})
            for arrived in (self._seen[run_id, int(row["step"])],)
        ]

    def _closed(self, rows: Iterable[Mapping[str, Any]], now_ms: int) -> tuple[ClosedStep, ...]:
        return closed_steps(rows, now_ms=now_ms, timeout_ms=self._timeout_ms)


def in_batches(closed: Sequence[ClosedStep], *, steps: int, records: int) -> list[list[ClosedStep]]:
    """Closed steps of one run each, in their order; the runs take turns, so that none waits for another.

    Args:
        closed: of any runs.
        steps: in one batch at most.
        records: rank steps in one batch at most, but for a step that has more by itself.
    """
    by_run: dict[str, list[tuple[ClosedStep, int]]] = {}
    for step in closed:
        by_run.setdefault(step.run_id, []).append((step, step.num_records))
    batches = [in_pieces(of_run, steps=steps, records=records) for of_run in by_run.values()]
    return [batch for turn in zip_longest(*batches) for batch in turn if batch is not None]


def in_pieces(sized: Iterable[tuple[_Step, int]], *, steps: int, records: int) -> list[list[_Step]]:
    """Steps in their order, cut after so many steps or rank steps, but for one that has more by itself.

    Args:
        sized: steps, as anything, with the number of their rank steps.
        steps: in one piece at most.
        records: rank steps in one piece at most.
    """
    pieces: list[list[_Step]] = []
    left = 0
    for step, num_records in sized:
        if not pieces or len(pieces[-1]) == steps or left < num_records:
            pieces.append([])
            left = records
        pieces[-1].append(step)
        left -= num_records
    return pieces


def _key(row: Mapping[str, Any]) -> StepKey:
    return (str(row["run_id"]), int(row["step"]))


def _arrived(row: Mapping[str, Any], *, arrivals: int) -> Arrived:
    return Arrived(first_ms=int(row["first_ms"]), last_ms=int(row["last_ms"]), arrivals=arrivals)
