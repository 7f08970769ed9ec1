"""Brings a store to this package's schema: applies migrations in order and records their checksums.

Safe to run again and again, and from two processes at once: every statement may be repeated (a test does)
and a version recorded twice is one row. A store that holds a migration this package does not know, or one
whose text differs from what was applied, is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from moetrace_collectors.errors import UsageError
from moetrace_schemas.clickhouse.render import (
    Migration,
    create_database,
    migrations,
    statements,
    time_to_live,
)


class Engine(Protocol):
    """What a migration needs of a clickhouse-connect client."""

    def command(self, cmd: str) -> Any:
        """Run a statement without a result set."""

    def query(self, query: str) -> Any:
        """Run a SELECT; the result has `result_rows`."""

    def insert(self, table: str, data: list[list[Any]], column_names: list[str]) -> Any:
        """Insert rows."""


def migrate(engine: Engine, *, database: str, cluster: str | None = None) -> tuple[Migration, ...]:
    """Apply what is missing.

    Args:
        engine: a client of the store.
        database: made if it does not exist.
        cluster: ClickHouse cluster to create replicated tables on; None for a single node.

    Returns:
        The migrations that were applied now, in order; empty where the store was current.

    Raises:
        UsageError: the store is newer than this package, or a migration has changed since it was applied.
    """
    known = migrations()
    engine.command(create_database(database=database, cluster=cluster))
    applied = _applied(engine, database)
    _check(applied, {migration.version: migration for migration in known}, database)
    missing = tuple(migration for migration in known if migration.version not in applied)
    for migration in missing:
        for statement in statements(migration.template, database=database, cluster=cluster):
            engine.command(statement)
        # Recorded behind its statements: a crash in between repeats what changes nothing the second time.
        engine.insert(
            f"{database}.schema_migrations",
            [[migration.version, migration.name, migration.checksum]],
            column_names=["version", "name", "checksum"],
        )
    return missing


def check_current(engine: Engine, *, database: str, store: str) -> None:
    """Refuse a store that is not of this version, for who reads and writes it but does not migrate.

    Raises:
        UsageError: it has no tables, lacks migrations, or is newer; says what to do.
    """
    known = {migration.version: migration for migration in migrations()}
    applied = _applied(engine, database)
    _check(applied, known, database)
    if known.keys() - applied.keys():
        raise UsageError(
            f"database {database} of {store} lacks {len(known.keys() - applied.keys())} migrations: run "
            f"moetrace migrate --dsn {store} --database {database} (with --cluster as before, on a cluster)"
        )


def keep_rows_for(
    engine: Engine, days_by_table: Mapping[str, int], *, database: str, cluster: str | None = None
) -> None:
    """Set the time to live of tables, days; 0 keeps rows for ever.

    Raises:
        MigrationError: a table without a time to live, or days out of range; nothing is changed then.
    """
    changes = [
        time_to_live(table, days, database=database, cluster=cluster) for table, days in days_by_table.items()
    ]
    for statement in changes:
        engine.command(statement)


def _applied(engine: Engine, database: str) -> dict[int, tuple[str, str]]:
    exists = engine.query(
        f"SELECT count() FROM system.tables WHERE database = '{database}' AND name = 'schema_migrations'"
    ).result_rows[0][0]
    if not exists:
        return {}
    rows = engine.query(
        f"SELECT version, name, checksum FROM {database}.schema_migrations FINAL ORDER BY version"
    ).result_rows
    return {int(version): (str(name), str(checksum)) for version, name, checksum in rows}


def _check(applied: Mapping[int, tuple[str, str]], known: Mapping[int, Migration], database: str) -> None:
    for version, (name, checksum) in applied.items():
        migration = known.get(version)
        if migration is None:
            raise UsageError(
                f"database {database} holds migration {name}, which this moetrace does not know "
                f"(it knows up to {max(known)}): upgrade moetrace"
            )
        if (migration.name, migration.checksum) != (name, checksum):
            raise UsageError(
                f"database {database}: migration {name} was applied with checksum {checksum[:12]} and is "
                f"{migration.name} with {migration.checksum[:12]} in this moetrace: use the one that made "
                "the database, or another database"
            )
