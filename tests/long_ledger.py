"""A long ledger in the embedded engine, for tests: `python -m long_ledger STORE ROWS [FORKED_SEQUENCE]`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from ledger_builders import report
from moetrace_collectors.ledger import ledger_rows
from moetrace_collectors.ledger.chain import LedgerRow, append
from moetrace_collectors.ledger.transition import mapping_row


def chain(count: int, forked: int | None) -> list[LedgerRow]:
    """Rows of one run, every one with its mapping; one number is there twice, with different content."""
    template = mapping_row(report(1), before=None, before_version=0, in_force=None, time_unix_ms=0)
    rows: list[LedgerRow] = []
    for number in range(count):
        row = replace(template, version=number + 1, time_unix_ms=number)
        rows.append(append(rows[-1] if rows else None, row))
    if forked is not None:
        rows.append(append(rows[forked - 1], replace(template, version=9_999_999)))
    return rows


def main(path: str, count: str, forked: str | None = None) -> None:
    """Migrate the store at `path` and fill it."""
    from moetrace_collectors.migrate import migrate
    from moetrace_collectors.store import embedded_dsn, open_client, parse_store

    client = open_client(parse_store(embedded_dsn(Path(path))))
    migrate(client, database="moetrace")
    client.insert(
        ledger_rows.LEDGER_TABLE,
        [
            ledger_rows.ledger_values(row)
            for row in chain(int(count), None if forked is None else int(forked))
        ],
        column_names=list(ledger_rows.LEDGER_COLUMNS),
        database="moetrace",
    )
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
