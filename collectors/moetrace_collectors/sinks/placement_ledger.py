"""The placement ledger as a sink: announcements and first steps of epochs become rows of the hash chain.

Unlike the other sinks it reads before it writes, because a row links to the one before. What it is given
waits in order until the store takes it; a store that is away holds up the worker as it does for every sink.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moetrace_collectors.errors import SinkError
from moetrace_collectors.events import CollectorEvent
from moetrace_collectors.ledger.chain import LedgerRow
from moetrace_collectors.ledger.client_store import ClientLedgerStore
from moetrace_collectors.ledger.comparison import Comparison
from moetrace_collectors.ledger.comparison_document import comparison_document
from moetrace_collectors.ledger.judge import ChangeJudge
from moetrace_collectors.ledger.recorder import Outcome, Recorder
from moetrace_collectors.ledger.transition import part_of
from moetrace_collectors.model import PlacementReport, RankStep
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.store import first_line
from moetrace_collectors.store_errors import RETRYABLE_CODES
from moetrace_schemas import metrics
from moetrace_schemas.enums import CountIds, PlacementEvent
from moetrace_schemas.placement import PlacementMap

MAX_WAITING = 1_000
"""Reports and epochs that wait for the store; one more is lost and counted."""
MAX_RUNS = 1_000
"""Runs whose epoch is remembered; of one that was forgotten the ledger is asked again."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStart:
    """A step that ran under another version than the steps before it."""

    run_id: str
    version: int
    step: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A change that was compared with what was before it."""

    run_id: str
    version: int
    comparison: Comparison


class LedgerSink:
    """Appends what changes; nothing per step."""

    name = "placement_ledger"
    num_waiting_steps = 0

    def __init__(
        self,
        client: Any,
        *,
        database: str,
        book: SeriesBook,
        unix_ms: Callable[[], int],
        on_conflict: Callable[[PlacementReport], None],
        on_lost: Callable[[str, int], None],
        judge: ChangeJudge | None = None,
    ) -> None:
        """Take a client of a migrated store.

        Args:
            client: clickhouse-connect client; closed by whoever made it.
            database: holds the tables.
            book: of the collector.
            unix_ms: wall clock.
            on_conflict: told of a mapping under a version that has another one.
            on_lost: told (table, rows) of rows that are given up.
            judge: knows what was before this process; None: nothing was.
        """
        self._store = ClientLedgerStore(client, database=database)
        self._recorder = Recorder(self._store, unix_ms=unix_ms)
        self._on_conflict = on_conflict
        self._on_lost = on_lost
        self._judge = ChangeJudge() if judge is None else judge
        self._waiting: deque[PlacementReport | EpochStart | Judged] = deque()
        self._num_taken = 0
        self._epochs: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Run -> (version, first step) of the epoch that was seen last."""
        self._rows = book.counter(metrics.PLACEMENT_ROWS_TOTAL)
        self._copied = book.counter(metrics.PLACEMENT_EXPERTS_COPIED_TOTAL)
        self._copied_bytes = book.counter(metrics.PLACEMENT_COPIED_BYTES_TOTAL)
        self._replicas = book.gauge(metrics.PLACEMENT_REPLICAS)
        self._rollback = book.gauge(metrics.PLACEMENT_ROLLBACK_VERSION)
        self._verdicts = book.counter(metrics.PLACEMENT_VERDICTS_TOTAL)
        self._received = book.counter(metrics.COLLECTOR_PLACEMENTS_TOTAL)

    @property
    def num_taken(self) -> int:
        """See Sink."""
        return self._num_taken

    @property
    def num_written(self) -> int:
        """See Sink."""
        return self._num_taken - len(self._waiting)

    def take_placement(self, report: PlacementReport) -> None:
        """A mapping was announced or proposed, or a change was judged by someone else."""
        if report.event is PlacementEvent.ANNOUNCED:
            self._judge.announce(report.run_id, report.version, report.terms)
        self._wait(report)

    def take_step(self, result: StepResult) -> None:
        """See Sink: only the first step of an epoch is of interest."""
        joined = result.joined
        # Ranks switch within a step of each other; the newest epoch is the one being rolled out.
        version = max(rank_step.placement_version for rank_step in joined.rank_steps)
        if not version:
            return
        judged = self._judge.take(joined, result.verdict, result.loads, version)
        if judged is not None:
            self._wait(Judged(run_id=joined.run_id, version=judged[0], comparison=judged[1]))
        last = self._epochs.get(joined.run_id)
        if last is not None and (last[0] == version or joined.step < last[1]):
            return
        self._epochs[joined.run_id] = (version, joined.step)
        self._epochs.move_to_end(joined.run_id)
        if len(self._epochs) > MAX_RUNS:
            self._epochs.popitem(last=False)
        self._wait(
            EpochStart(
                run_id=joined.run_id, version=version, step=joined.step, num_ranks=len(joined.rank_steps)
            )
        )

    def take_unjoined(self, rank_step: RankStep) -> None:
        """See Sink."""

    def take_late(self, rank_step: RankStep) -> None:
        """See Sink."""

    def take_event(self, event: CollectorEvent) -> None:
        """See Sink."""

    def is_due(self, now_ns: int) -> bool:
        """See Sink: a change is written at once."""
        return bool(self._waiting)

    def flush(self) -> None:
        """See Sink."""
        while self._waiting:
            try:
                self._write(self._waiting[0])
            except (self._store.error, OSError) as error:
                code = getattr(error, "code", None)
                retryable = isinstance(error, OSError) or not code or code in RETRYABLE_CODES
                if not retryable:
                    self._lose()
                raise SinkError(f"{self.name}: {first_line(error)}", retryable=retryable) from error
            except ValueError as error:
                # A row of the ledger that cannot be read holds up no other run.
                self._lose()
                raise SinkError(f"{self.name}: {first_line(error)}", retryable=False) from error
            self._waiting.popleft()

    def abandon(self) -> None:
        """See Sink."""
        while self._waiting:
            self._lose()

    def mapping(self, run_id: str, version: int) -> tuple[PlacementMap, CountIds] | None:
        """A mapping that the ledger holds from before this process began; None where it has none.

        Raises:
            OSError: the store cannot be asked now.
        """
        try:
            rows = [
                row
                for row in self._store.of_version(run_id, version)
                if row.event == PlacementEvent.ANNOUNCED
            ]
            found = self._recorder.mapping(run_id, version) if rows else None
            return None if found is None else (found, _count_ids(rows[-1]))
        except (KeyError, ValueError) as error:
            logger.warning("the mapping of run %s, version %d: %s", run_id, version, first_line(error))
            return None
        except self._store.error as error:
            raise OSError(first_line(error)) from error

    def _wait(self, what: PlacementReport | EpochStart | Judged) -> None:
        self._waiting.append(what)
        self._num_taken += 1
        if len(self._waiting) > MAX_WAITING:
            self._lose()

    def _lose(self) -> None:
        self._waiting.popleft()
        self._on_lost(self.name, 1)

    def _write(self, what: PlacementReport | EpochStart | Judged) -> None:
        if isinstance(what, Judged):
            document = comparison_document(what.comparison, run_id=what.run_id)
            self._write_judged(document, run_id=what.run_id, version=what.version)
        elif isinstance(what, EpochStart):
            row = self._recorder.applied(
                run_id=what.run_id, version=what.version, step=what.step, num_ranks=what.num_ranks
            )
            if row is not None:
                self._rows.add(labels=(row.run_id, row.event))
                self._begun(row)
        elif what.event is PlacementEvent.JUDGED:
            self._write_judged(json.loads(what.comparison), run_id=what.run_id, version=what.version)
        else:
            self._write_mapping(what)

    def _write_judged(self, document: dict[str, Any], *, run_id: str, version: int) -> None:
        outcome, row = self._recorder.judged(document, run_id=run_id, version=version)
        if outcome is not Outcome.RECORDED:
            return
        self._rows.add(labels=(row.run_id, row.event))
        self._verdicts.add(labels=(row.run_id, row.verdict))

    def _write_mapping(self, report: PlacementReport) -> None:
        outcome, row = self._recorder.record(report)
        self._received.add(labels=(outcome.value,))
        if outcome is Outcome.CONFLICTING:
            self._on_conflict(report)
        if outcome is not Outcome.RECORDED or row is None:
            return
        self._rows.add(labels=(row.run_id, row.event))
        if row.event == PlacementEvent.ANNOUNCED:
            self._copied.add(row.experts_copied or 0, (row.run_id,))
            if row.copied_bytes is not None:
                self._copied_bytes.add(row.copied_bytes, (row.run_id,))
            self._replicas.set(report.mapping.num_replicas, (row.run_id,))
            if row.rollback_version:
                self._rollback.set(row.rollback_version, (row.run_id,))

    def _begun(self, row: LedgerRow) -> None:
        if row.rollback_version:
            self._rollback.set(row.rollback_version, (row.run_id,))
        mapping = self._recorder.mapping(row.run_id, row.version)
        if mapping is not None:
            self._replicas.set(mapping.num_replicas, (row.run_id,))


def _count_ids(row: LedgerRow) -> CountIds:
    return CountIds(part_of(row, "terms")["count_ids"])
