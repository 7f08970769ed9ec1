"""The ledger rows of a join: epochs that begin, and what changes are judged to be, as of a collector.

One process writes them, and what it knew is read back from the store when it starts again, so that each is
written once. Announcements are in the ledger already: the collectors wrote them as they came.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from moetrace_collectors.errors import SinkError, UsageError
from moetrace_collectors.ledger.chain import LedgerRow
from moetrace_collectors.ledger.client_store import ClientLedgerStore
from moetrace_collectors.ledger.epochs import EpochMap, epoch_map
from moetrace_collectors.ledger.judge import ChangeJudge
from moetrace_collectors.ledger.past_epochs import read_past
from moetrace_collectors.ledger.transition import part_of
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.placement_ledger import LedgerSink
from moetrace_collectors.store import first_line
from moetrace_collectors.store_questions import Ask
from moetrace_schemas.enums import PlacementEvent
from moetrace_schemas.placement import PlacementTerms

MAX_TERMS = 256
"""(run, version) whose terms are known to be told."""

logger = logging.getLogger(__name__)


class JoinLedger:
    """Judges changes as their steps are joined; not thread-safe."""

    def __init__(
        self,
        client: Any,
        *,
        database: str,
        ask: Ask,
        book: SeriesBook,
        on_lost: Callable[[str, int, str], None],
    ) -> None:
        """Take a client of a migrated store.

        Args:
            client: clickhouse-connect client; closed by the caller.
            database: holds the tables.
            ask: rows of a query with parameters, through the same client.
            book: gets the series of the ledger.
            on_lost: told (table, rows, reason) of rows that the store refuses for good.
        """
        self._ask = ask
        self._on_lost = on_lost
        self._num_lost = 0
        """Not told yet."""
        self._store = ClientLedgerStore(client, database=database)
        self._judge = ChangeJudge()
        self._has_terms: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._sink = LedgerSink(
            client,
            database=database,
            book=book,
            unix_ms=lambda: time.time_ns() // 1_000_000,
            on_conflict=lambda report: None,
            on_lost=self._lost,
            judge=self._judge,
        )

    def prepare(self, run_id: str, versions: Collection[int]) -> None:
        """Read what must be known before steps of these versions are taken; what it raises is the store's."""
        for version in versions:
            self._learn_terms(run_id, version)
        if versions and not self._judge.knows(run_id):
            past = read_past(self._store, self._ask, run_id)
            if past is not None:
                self._learn_terms(run_id, past.now.version)
                self._judge.resume(run_id, past.now, past.before)

    def maps(self, run_id: str, versions: Collection[int]) -> dict[int, EpochMap | None]:
        """What folds counts of these versions; None where the ledger has no mapping."""
        found = {version: self._sink.mapping(run_id, version) for version in versions}
        return {version: None if told is None else epoch_map(*told) for version, told in found.items()}

    def take(self, results: Sequence[StepResult]) -> None:
        """Steps that were judged now, in order; nothing is written yet."""
        for result in results:
            self._sink.take_step(result)
        self._tell_lost("too many wait for the store")

    def flush(self) -> None:
        """Write what there is to write.

        Raises:
            UsageError: the store does not take it now; it is kept.
        """
        while True:
            try:
                self._sink.flush()
            except SinkError as error:
                if error.retryable:
                    raise UsageError(f"the store does not take rows: {error}") from error
                self._tell_lost(str(error))
                continue
            return

    def _lost(self, table: str, num_rows: int) -> None:
        self._num_lost += num_rows

    def _tell_lost(self, reason: str) -> None:
        """Tell of what the sink has given up, with the reason that only its caller knows."""
        num_lost, self._num_lost = self._num_lost, 0
        if num_lost:
            self._on_lost(self._sink.name, num_lost, reason)

    def _learn_terms(self, run_id: str, version: int) -> None:
        key = (run_id, version)
        if key in self._has_terms:
            return
        announced = [
            row for row in self._store.of_version(run_id, version) if row.event == PlacementEvent.ANNOUNCED
        ]
        if not announced:
            return  # it may still come, through another collector
        try:
            self._judge.announce(run_id, version, _terms(announced[-1]))
        except (TypeError, ValueError) as error:
            # Changed by somebody: it must hold up no step, and is judged as if nothing had been said.
            logger.warning("the terms of run %s, version %d: %s", run_id, version, first_line(error))
        self._has_terms[key] = None
        if len(self._has_terms) > MAX_TERMS:
            self._has_terms.popitem(last=False)


def _terms(row: LedgerRow) -> PlacementTerms:
    """What a judge needs of the terms of an announcement."""
    told = part_of(row, "terms")
    default = PlacementTerms()
    # The ledger says of every row where to go back to; where nobody did, it is the version before.
    rollback = row.rollback_version if row.rollback_version != row.previous_version else None
    return PlacementTerms(
        max_slowdown=told.get("max_slowdown", default.max_slowdown),
        max_error_rate=told.get("max_error_rate", default.max_error_rate),
        rollback_version=rollback,
    )
