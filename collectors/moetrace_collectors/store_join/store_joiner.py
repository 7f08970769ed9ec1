"""Judges the steps of a store one after the other, and writes what a collector would have written.

One process at a time: the engine's memory of calm steps is in it. When it starts it judges the newest judged
steps again, without writing, so that its memory is not empty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from moetrace_collectors.errors import UsageError
from moetrace_collectors.events import CollectorEvent, EventKind
from moetrace_collectors.incarnations import TWO_JOBS_REASON
from moetrace_collectors.ledger.epochs import EpochMap
from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_collectors.receipts import group_violations
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse_columns import TableColumns, expert_loads
from moetrace_collectors.sinks.clickhouse_rows import TableRows, event_rows, verdict_rows
from moetrace_collectors.store import first_line
from moetrace_collectors.store_clock import HOUR_MS, NOW
from moetrace_collectors.store_errors import is_retryable, store_answers
from moetrace_collectors.store_join import queries
from moetrace_collectors.store_join.closed_steps import ClosedStep, joined_step
from moetrace_collectors.store_join.executions import (
    ExecutedAgain,
    ExecutionWatch,
    ReuseNotice,
)
from moetrace_collectors.store_join.folding import folded, late_counts
from moetrace_collectors.store_join.join_ledger import JoinLedger
from moetrace_collectors.store_join.minutes_again import not_rolled_up
from moetrace_collectors.store_join.rank_rows import StoredRows, rank_steps_of_rows
from moetrace_collectors.store_join.step_finder import (
    StepFinder,
    in_batches,
    in_pieces,
)
from moetrace_collectors.store_questions import StepKey, in_questions
from moetrace_collectors.summary import layer_loads
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_collectors.verdict.no_verdict import EXECUTED_AGAIN, TWO_JOBS, no_verdict

STEPS_AT_ONCE = 16
RECORDS_AT_ONCE = 512
"""Steps, and rank steps of them, read and written together; bounds memory: a rank step of 60 layers takes
some 100 KB as it is read."""
RECORDS_COMPARED = 8_192
"""Rank steps of which one question compares what is counted with what is told: some 100 bytes of the store's
memory for each of their layers and kinds."""
COUNTS = {"experts": queries.EXPERTS, "unfolded": queries.UNFOLDED}
PARTS = {
    **COUNTS,
    "phases": queries.PHASES,
    "traffic": queries.TRAFFIC,
    "violations": queries.VIOLATIONS,
    "waits": queries.WAITS,
}
"""Parts of a rank step, as StoredRows names them, and the query of each."""

logger = logging.getLogger(__name__)
_Made = TypeVar("_Made")


class _TurnEndsError(Exception):
    """The turn must not go on; what it has not done is left for the next one."""


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
        on_grown: Callable[[Iterable[tuple[str, int]]], None] = lambda starts: None,
        on_lost: Callable[[str, int, str], None] = lambda table, num_rows, reason: None,
        on_reused: Callable[[ReuseNotice], None] = lambda notice: None,
        book: SeriesBook | None = None,
    ) -> None:
        """Take a clickhouse-connect client of a migrated store; closed by the caller.

        Args:
            client: of the store.
            settings: what a user chose.
            on_written: told of steps that were judged now, once their rows are in the store.
            on_grown: told (run, unix ns) of minutes, by a start in each, to which rows may have come behind
                verdicts.
            on_lost: told (table, rows, reason) of rows that the store refuses for good, and of rank
                steps that do not read.
            on_reused: told of a run id that is used again, once.
            book: gets the series of the ledger; None for nobody.
        """
        from clickhouse_connect.driver.exceptions import ClickHouseError

        self._error: type[Exception] = ClickHouseError
        self._client = client
        self._settings = settings
        self._on_written = on_written
        self._on_grown = on_grown
        self._on_lost = on_lost
        self._on_reused = on_reused
        self._finder = StepFinder(
            self._rows,
            timeout_ms=int(settings.timeout_s * 1_000),
            look_back_hours=settings.look_back_hours,
            run_id=settings.run_id,
        )
        self._ledger = JoinLedger(
            client,
            database=settings.database,
            ask=self._rows,
            book=SeriesBook() if book is None else book,
            on_lost=on_lost,
        )
        self._watch = ExecutionWatch()
        self._unsaid: list[ReuseNotice] = []
        self._unwritten: list[StepResult] = []
        self._unrendered: list[StepResult] = []
        """Those of which no rows have been made yet."""
        self._unwritten_rows: list[TableColumns | TableRows] = []
        self._unmarked: set[tuple[str, int]] = set()
        """(run, unix ns) of rank steps whose counts come behind a verdict, until their minutes are marked."""
        self._engine = VerdictEngine()
        self._remembers = False
        self._has_told_waiting = False
        self._go_on: Callable[[], bool] = lambda: True
        self._num_written = 0
        """In this turn."""

    def turn(self, *, go_on: Callable[[], bool] = lambda: True) -> int:
        """Judge and write every step that has closed since the last turn; how many there were.

        Args:
            go_on: asked before each question and before anything is written; False leaves the rest for
                the next turn.

        Raises:
            UsageError: the store does not answer, or does not take the rows now; the next turn goes on, and
                no step is judged twice.
        """
        self._go_on = go_on
        self._num_written = 0
        with store_answers(), suppress(_TurnEndsError):
            try:
                self._turn()
            except MemoryError as error:
                # What is judged is kept, and the rest found again.
                raise UsageError("no memory for this turn of the join") from error
        return self._num_written

    def _turn(self) -> None:
        self._write()
        self._mark_minutes()
        now_ms = self._now_ms()
        found = self._finder.look(now_ms, remember=not self._remembers)
        self._notice(found.again, now_ms)
        again = {(one.run_id, one.step) for one in found.again}
        if not self._remembers:
            self._remember([step for step in found.judged if (step.run_id, step.step) not in again])
        for batch in _batches(found.closed):
            self._check()
            no_memory = self._judge_and_keep(batch, again)
            self._write()
            if no_memory is not None:
                raise no_memory
        # Last: at a start these are all steps that were judged before.
        self._catch_up(found.grown)
        if not self._has_told_waiting:
            self._tell_waiting(now_ms)
        self._finder.turned()

    def _now_ms(self) -> int:
        return int(self._client.query(NOW).result_rows[0][0])

    def _check(self) -> None:
        """Leave the turn where it is, if it must not go on: as if the store did not answer."""
        if not self._go_on():
            raise _TurnEndsError

    def _notice(self, again: Sequence[ExecutedAgain], now_ms: int) -> None:
        """Say what there is to say of run ids, and file it; also what a process before has not."""
        notices = [notice for one in again if (notice := self._watch.saw(one)) is not None]
        shared = {notice.run_id for notice in notices if notice.reason == TWO_JOBS_REASON}
        # Of what comes to light together, two jobs are the whole story.
        self._unsaid += [one for one in notices if one.reason == TWO_JOBS_REASON or one.run_id not in shared]
        while self._unsaid:
            notice = self._unsaid[0]
            asked = {"run": notice.run_id, "reason": notice.reason, "since_ms": notice.since_ms}
            if not int(self._rows(queries.TOLD, asked)[0]["told"]):
                logger.warning("%s", notice.text)
                self._on_reused(notice)
                self._unwritten_rows.append(event_rows([_event(notice, now_ms)]))
            self._unsaid.pop(0)
        if self._unwritten_rows:
            self._write()

    def _remember(self, judged: Sequence[ClosedStep]) -> None:
        # A try that failed in the middle has left half a memory.
        self._engine = VerdictEngine()
        for batch in _batches(judged):
            for _, joined in self._joined(batch)[0]:
                if not self._is_shared(joined):
                    self._judged(joined)
        self._remembers = True

    def _catch_up(self, grown: Sequence[StepKey]) -> None:
        """Steps keep their verdict; counts that came since must not stay where no reader looks."""
        for run_id, steps in in_questions(grown):
            self._tell_counts(run_id, self._steps(queries.HAS_UNFOLDED, run_id, steps))
            starts = self._rows(queries.STARTS, {"run": run_id, "steps": steps})
            self._on_grown((run_id, int(row["start_unix_ns"])) for row in starts)
            self._finder.done((run_id, step) for step in steps)

    def _tell_waiting(self, now_ms: int) -> None:
        """Counts of steps before the first look: they came while nobody joined, and would expire there."""
        if self._settings.look_back_hours:
            asked = {
                "before_ms": now_ms - int(self._settings.look_back_hours * HOUR_MS),
                "run": self._settings.run_id,
            }
            waiting = [(str(row["run_id"]), int(row["step"])) for row in self._rows(queries.WAITING, asked)]
            for run_id, steps in in_questions(waiting):
                self._tell_counts(run_id, steps)
        self._has_told_waiting = True

    def _tell_counts(self, run_id: str, steps: list[int]) -> None:
        """Write counts that `expert_loads` has not, and have their minutes rolled up again."""
        there = self._rows(queries.STEPS, {"run": run_id, "steps": steps}) if steps else []
        sizes = {int(row["step"]): int(row["records"]) for row in there}
        untold: list[int] = []
        for asked in in_pieces(sorted(sizes.items()), steps=len(sizes), records=RECORDS_COMPARED):
            untold += self._steps(queries.UNTOLD, run_id, asked)
        sized = ((step, sizes[step]) for step in untold)
        for together in in_pieces(sized, steps=STEPS_AT_ONCE, records=RECORDS_AT_ONCE):
            by_step = self._of_steps(run_id, together, COUNTS)
            maps = self._maps([one for ones in by_step.values() for one in ones])
            late = {
                step: made
                for step, ones in by_step.items()
                if (made := self._guarded(run_id, step, partial(_late, ones, maps)))
            }
            rows = self._counts(run_id, late)
            if not rows:
                continue
            starts = {(run_id, one.start_unix_ns) for ones in late.values() for one in ones}
            # A process that is killed behind the counts does not come to mark them after that.
            self._unwritten_rows += [not_rolled_up(starts, now_ms=self._now_ms()), *rows]
            self._unmarked |= starts
            self._write()
            self._mark_minutes()

    def _mark_minutes(self) -> None:
        """Have minutes rolled up again whose counts are in the store now.

        Also where the turn must not go on: a later one does not find the counts untold.
        """
        if self._unmarked:
            self._unwritten_rows.append(not_rolled_up(self._unmarked, now_ms=self._now_ms()))
            self._insert_all()
            starts, self._unmarked = self._unmarked, set()
            self._on_grown(sorted(starts))

    def _steps(self, sql: str, run_id: str, steps: list[int]) -> list[int]:
        rows = self._rows(sql, {"run": run_id, "steps": steps})
        return sorted(int(row["step"]) for row in rows)

    def _judge_and_keep(self, batch: Sequence[ClosedStep], again: set[StepKey]) -> UsageError | None:
        """Returns why not all are judged, if so: those before are kept, and the others are found again."""
        # All reading first: what has been judged must be kept, or the engine would see it twice.
        run_id = batch[0].run_id
        steps, counts = self._joined(batch)
        versions = {one.placement_version for _, joined in steps for one in joined.rank_steps}
        self._ledger.prepare(run_id, versions - {0})
        # Counts before verdicts: who sees a verdict finds what it rests on.
        self._unwritten_rows += counts
        for closed, joined in steps:
            if self._is_shared(joined):
                reason = TWO_JOBS
            elif (run_id, closed.step) in again:
                reason = EXECUTED_AGAIN
            else:
                reason = ""
            try:
                result = _unjudged(joined, reason) if reason else self._judged(joined)
                self._unwritten.append(result)
                self._unrendered.append(result)
                take = partial(self._ledger.take, [result])
                self._guarded(run_id, closed.step, take, table="placement_ledger")
            except UsageError as error:
                return error
        return None

    def _is_shared(self, joined: JoinedStep) -> bool:
        return self._watch.is_shared(joined.run_id, joined.rank_steps[0].start_unix_ns)

    def _judged(self, joined: JoinedStep) -> StepResult:
        try:
            return StepResult(
                joined=joined,
                verdict=self._engine.judge(joined),
                loads=layer_loads(joined),
                violations=group_violations(joined),
            )
        except MemoryError as error:
            raise UsageError(f"no memory to judge run {joined.run_id}, step {joined.step}") from error
        except Exception as error:
            # As in a collector: a fault of ours in one step must not hold up those behind it.
            logger.exception("no verdict for run %s, step %d", joined.run_id, joined.step)
            reason = f"The verdict stage failed with {type(error).__name__}; see the log of moetrace join."
            return _unjudged(joined, reason)

    def _joined(
        self, batch: Sequence[ClosedStep]
    ) -> tuple[list[tuple[ClosedStep, JoinedStep]], list[TableColumns]]:
        """Read steps of one run, in their order; also counts that `expert_loads` has not yet."""
        run_id = batch[0].run_id
        by_step = self._of_steps(run_id, [step.step for step in batch], PARTS)
        of_run = [one for ones in by_step.values() for one in ones]
        maps = self._maps(of_run)
        steps, late = [], {}
        for closed in batch:
            # Rows of a step may expire after it was counted, or this replica has them not yet.
            ones = by_step.get(closed.step)
            made = ones and self._guarded(run_id, closed.step, partial(_folded, closed, ones, maps))
            if made:
                joined, late[closed.step] = made
                steps.append((closed, joined))
            elif ones:
                self._finder.done([(run_id, closed.step)])
        return steps, self._counts(run_id, late)

    def _counts(self, run_id: str, late: Mapping[int, Sequence[RankStep]]) -> list[TableColumns]:
        """Rows of `expert_loads`, of all steps together where that works."""
        late = {step: ones for step, ones in late.items() if ones}
        made: list[TableColumns | None]
        try:
            made = [expert_loads([one for ones in late.values() for one in ones])] if late else []
        except Exception:  # noqa: BLE001 - each alone says what is wrong
            made = [
                self._guarded(run_id, step, partial(expert_loads, ones), table="expert_loads")
                for step, ones in late.items()
            ]
        # Of counts that are all zero there may be no row.
        return [rows for rows in made if rows is not None and len(rows)]

    def _render(self) -> None:
        """Make the rows of what is judged."""
        try:
            self._unwritten_rows += [rows for rows in verdict_rows(self._unrendered) if len(rows)]
        except Exception:  # noqa: BLE001 - each alone says what is wrong
            while self._unrendered:
                result = self._unrendered[0]
                run_id, step = result.joined.run_id, result.joined.step
                made = self._guarded(run_id, step, partial(verdict_rows, [result]), table="step_verdicts")
                self._unwritten_rows += [rows for rows in made or () if len(rows)]
                self._unrendered.pop(0)
        self._unrendered = []

    def _guarded(
        self, run_id: str, step: int, make: Callable[[], _Made], *, table: str = "rank_steps"
    ) -> _Made | None:
        """What is made of one step; None, and told as lost, where that fails: it must not hold up others.

        Raises:
            UsageError: there is no memory for it now.
        """
        try:
            return make()
        except MemoryError as error:
            raise UsageError(f"no memory for run {run_id}, step {step}") from error
        except Exception as error:
            logger.exception("run %s, step %d: nothing for %s", run_id, step, table)
            self._on_lost(table, 1, f"run {run_id}, step {step}: {type(error).__name__}: {first_line(error)}")
            return None

    def _of_steps(self, run_id: str, steps: list[int], parts: Mapping[str, str]) -> dict[int, list[RankStep]]:
        """Rank steps by step number, with some of their parts; without steps of which none can be made."""
        named = {"run": run_id, "steps": steps}
        records: list[Mapping[str, Any]] = []
        try:
            records = self._rows(queries.RANK_STEPS, named)
            read = {part: self._rows(sql, named) for part, sql in parts.items()}
            return rank_steps_of_rows(StoredRows(records=records, **read))
        except (self._error, OSError, _TurnEndsError):
            raise
        except Exception as error:
            if len(steps) > 1:
                alone = [self._of_steps(run_id, [step], parts) for step in steps]
                return {step: ones for found in alone for step, ones in found.items()}
            if isinstance(error, MemoryError):
                raise UsageError(f"no memory to read run {run_id}, step {steps[0]}") from error
            # Rows that no collector of this version writes: they must not hold up the steps behind them.
            logger.exception("run %s, step %d does not read", run_id, steps[0])
            reason = f"run {run_id}, step {steps[0]}: {type(error).__name__}: {first_line(error)}"
            self._on_lost("rank_steps", max(1, len(records)), reason)
            self._finder.done([(run_id, steps[0])])
            return {}

    def _maps(self, of_run: Sequence[RankStep]) -> dict[int, EpochMap | None]:
        versions = {one.placement_version for one in of_run if one.unfolded}
        return self._ledger.maps(of_run[0].run_id, versions) if versions else {}

    def _write(self) -> None:
        """Write what is judged; after a failure the rest. What is refused for good is given up and told."""
        # Of all tables the ledger alone keeps what two have written.
        self._check()
        # The ledger before the steps: a reader who sees an epoch's steps finds the epoch.
        self._ledger.flush()
        self._render()
        self._insert_all()
        results, self._unwritten = self._unwritten, []
        self._finder.done((result.joined.run_id, result.joined.step) for result in results)
        if results:
            self._on_written(results)
        self._num_written += len(results)

    def _insert_all(self) -> None:
        while self._unwritten_rows:
            rows = self._unwritten_rows[0]
            try:
                self._insert(rows)
            except (self._error, ValueError, TypeError, OverflowError) as error:
                if is_retryable(error):
                    raise
                # The same rows would be refused for ever and hold up every step behind them.
                self._on_lost(rows.table, len(rows), first_line(error))
            self._unwritten_rows.pop(0)

    def _insert(self, rows: TableColumns | TableRows) -> None:
        database = self._settings.database
        if isinstance(rows, TableColumns):
            self._client.insert_arrow(rows.table, rows.arrow, database=database)
            return
        self._client.insert(
            rows.table,
            list(rows.columns),
            column_names=list(rows.names),
            database=database,
            column_oriented=True,
        )

    def _rows(self, sql: str, parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        self._check()
        bound = {**parameters, "database": self._settings.database}
        return list(self._client.query(sql, parameters=bound).named_results())


def _batches(closed: Sequence[ClosedStep]) -> list[list[ClosedStep]]:
    return in_batches(closed, steps=STEPS_AT_ONCE, records=RECORDS_AT_ONCE)


def _late(rank_steps: Sequence[RankStep], maps: Mapping[int, EpochMap | None]) -> list[RankStep]:
    """Those with counts that `expert_loads` has not, with only these."""
    return [counts for one in rank_steps if (counts := late_counts(one, maps)) is not None]


def _folded(
    closed: ClosedStep, ones: Sequence[RankStep], maps: Mapping[int, EpochMap | None]
) -> tuple[JoinedStep, list[RankStep]]:
    """A step with all its counts, and the rank steps with those that `expert_loads` has not."""
    return joined_step(closed, [folded(one, maps) for one in ones]), _late(ones, maps)


def _unjudged(joined: JoinedStep, reason: str) -> StepResult:
    return StepResult(joined=joined, verdict=no_verdict(joined, reason), loads=())


def _event(notice: ReuseNotice, now_ms: int) -> CollectorEvent:
    return CollectorEvent(
        time_unix_ms=now_ms,
        kind=EventKind.RUN_ID_REUSED,
        reason=notice.reason,
        run_id=notice.run_id,
        step=notice.step,
        rank=notice.rank,
        detail=notice.text,
    )
