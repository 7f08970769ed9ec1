"""The ledger in a store, through a clickhouse-connect client: the embedded engine and servers alike."""

from __future__ import annotations

from typing import Any

from moetrace_collectors.ledger import ledger_rows as names
from moetrace_collectors.ledger.chain import LedgerRow
from moetrace_schemas.placement import PlacementMap


class ClientLedgerStore:
    """Reads and appends; see LedgerStore. `error` is what its calls raise beside OSError."""

    error: type[Exception]

    def __init__(self, client: Any, *, database: str) -> None:
        """Take a client of a migrated store; it stays the caller's to close."""
        from clickhouse_connect.driver.exceptions import ClickHouseError

        self.error = ClickHouseError
        self._client = client
        self._database = database

    def head(self, run_id: str) -> LedgerRow | None:
        """See LedgerStore."""
        return next(iter(self._rows(names.HEAD, run_id)), None)

    def of_version(self, run_id: str, version: int) -> list[LedgerRow]:
        """See LedgerStore."""
        return self._rows(names.OF_VERSION, run_id, version=version)

    def newest_mappings(self, run_id: str) -> list[LedgerRow]:
        """See LedgerStore."""
        return self._rows(names.NEWEST_MAPPINGS, run_id)

    def newest_applied(self, run_id: str) -> LedgerRow | None:
        """See LedgerStore."""
        return next(iter(self._rows(names.NEWEST_APPLIED, run_id)), None)

    def last_applied(self, run_id: str) -> list[LedgerRow]:
        """The last epochs that were seen to begin, the newest first."""
        return self._rows(names.LAST_APPLIED, run_id)

    def judged(self, run_id: str, version: int) -> list[LedgerRow]:
        """Verdicts of a version, the newest first."""
        return self._rows(names.JUDGED_OF_VERSION, run_id, version=version)

    def insert(self, row: LedgerRow) -> None:
        """See LedgerStore."""
        self._client.insert(
            names.LEDGER_TABLE,
            [names.ledger_values(row)],
            column_names=list(names.LEDGER_COLUMNS),
            database=self._database,
        )

    def insert_slots(self, run_id: str, version: int, mapping: PlacementMap) -> None:
        """See LedgerStore."""
        self._client.insert(
            names.SLOTS_TABLE,
            names.slot_columns(run_id, version, mapping),
            column_names=list(names.SLOT_COLUMNS),
            database=self._database,
            column_oriented=True,
        )

    def _rows(self, sql: str, run_id: str, **values: int) -> list[LedgerRow]:
        result = self._client.query(sql, parameters={"database": self._database, "run": run_id, **values})
        return [names.ledger_row(values) for values in result.named_results()]
