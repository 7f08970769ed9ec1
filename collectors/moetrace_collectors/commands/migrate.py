"""`moetrace migrate`: bring a store to this version's schema, or show what that would run."""

from __future__ import annotations

import argparse
from pathlib import Path

from moetrace_collectors import owner
from moetrace_collectors.errors import UsageError
from moetrace_collectors.migrate import keep_rows_for, migrate
from moetrace_collectors.store import StoreAddress, embedded_dsn, open_client, parse_store
from moetrace_collectors.store_errors import store_takes_migrations
from moetrace_schemas.clickhouse.render import (
    MigrationError,
    create_database,
    migrations,
    statements,
    time_to_live,
)

HELP = "make or update the tables of a store (moetrace collect does it for its own)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--dir", type=Path, metavar="DIR", help="run directory with an embedded store")
    target.add_argument("--dsn", help="store: chdb:///path, clickhouse://host:port or https://host:port")
    target.add_argument("--print", action="store_true", help="print the statements and run nothing")
    parser.add_argument("--database", default="moetrace", help="database of the tables (default: moetrace)")
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="make replicated tables, sharded by step, on this ClickHouse cluster (ON CLUSTER)",
    )
    parser.add_argument(
        "--ttl",
        action="append",
        default=[],
        metavar="TABLE=DAYS",
        help="keep the rows of a table for so many days (0 = for ever); several allowed. "
        "Raw rows of ranks stay 30 days, verdicts 365, roll-ups 400 unless this says otherwise",
    )


def run(arguments: argparse.Namespace) -> int:
    """Apply what is missing; 0 when the store is current."""
    try:
        if arguments.print:
            _print(arguments.database, arguments.cluster, _days(arguments.ttl))
            return 0
        address = _address(arguments)
        if arguments.cluster is not None and address.embedded_path is not None:
            raise UsageError("--cluster needs a ClickHouse server: give its --dsn, or --print the statements")
        return _apply(address, arguments)
    except MigrationError as error:
        raise UsageError(str(error)) from error


def _days(options: list[str]) -> dict[str, int]:
    days: dict[str, int] = {}
    for option in options:
        table, _, number = option.partition("=")
        if not number.isdecimal():
            raise UsageError(f"--ttl {option}: TABLE=DAYS expected, as in phase_spans=14")
        days[table] = int(number)
    return days


def _print(database: str, cluster: str | None, days_by_table: dict[str, int]) -> None:
    to_run = [create_database(database=database, cluster=cluster)]
    for item in migrations():
        to_run += statements(item.template, database=database, cluster=cluster)
    to_run += [
        time_to_live(table, days, database=database, cluster=cluster) for table, days in days_by_table.items()
    ]
    for statement in to_run:
        print(f"{statement.strip()};\n")


def _address(arguments: argparse.Namespace) -> StoreAddress:
    if arguments.dsn:
        return parse_store(arguments.dsn)
    if arguments.dir is None:
        raise UsageError("which store? give --dir DIR, --dsn DSN, or --print")
    return parse_store(embedded_dsn(arguments.dir / "store"))


def _apply(address: StoreAddress, arguments: argparse.Namespace) -> int:
    days_by_table = _days(arguments.ttl)
    for table, days in days_by_table.items():  # a mistake is told before anything is changed
        time_to_live(table, days, database=arguments.database)
    folder = address.embedded_path.parent if address.embedded_path is not None else None
    ownership = owner.acquire(folder, address) if folder is not None else None
    try:
        client = open_client(address)
        try:
            with store_takes_migrations(address.display):
                applied = migrate(client, database=arguments.database, cluster=arguments.cluster)
                keep_rows_for(client, days_by_table, database=arguments.database, cluster=arguments.cluster)
        finally:
            client.close()
    finally:
        if ownership is not None:
            ownership.release()
    for migration in applied:
        print(f"applied {migration.name}")
    for table, days in days_by_table.items():
        print(f"{table}: rows are kept {f'{days} days' if days else 'for ever'}")
    if not applied:
        print(f"{address.display}: database {arguments.database} is current")
    return 0
