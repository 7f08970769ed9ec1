"""The collector's own sink into a fresh embedded store, for scripts that fill one for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moetrace_collectors.ledger.ledger_rows import SLOT_COLUMNS, SLOTS_TABLE
from moetrace_collectors.migrate import migrate
from moetrace_collectors.roll_ups.roll_up import RollUp, RollUpSettings
from moetrace_collectors.sinks.clickhouse import ClickHouseSink
from moetrace_collectors.store import embedded_dsn, open_client, parse_store


class StoreSink(ClickHouseSink):
    """A sink with a store of its own."""

    def place(self, rows: Sequence[Sequence[object]]) -> None:
        """Write which rank holds which expert, in rows as of SLOT_COLUMNS."""
        self._client.insert(f"moetrace.{SLOTS_TABLE}", rows, column_names=SLOT_COLUMNS)

    def close(self) -> None:
        """Give the store back."""
        self._client.close()


def sink_into(path: Path, *, batch_bytes: int = 1 << 30) -> StoreSink:
    """A sink that writes when it is flushed, rank steps of `batch_bytes` at once; the store is migrated."""
    client = open_client(parse_store(embedded_dsn(path)))
    migrate(client, database="moetrace")
    return StoreSink(
        client,
        database="moetrace",
        batch_bytes=batch_bytes,
        on_stored=lambda table, rows: None,
        on_lost=lambda table, rows: None,
    )


def roll_up(path: Path) -> None:
    """What a collector does when it stops: roll up everything that is in the store."""
    client = open_client(parse_store(embedded_dsn(path)))
    RollUp(client, RollUpSettings(database="moetrace")).turn(everything=True)
    client.close()
