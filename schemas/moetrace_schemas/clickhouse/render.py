"""Lists the migrations that ship with the package and renders their templates. Standard library only.

A migration is one statement in one `.sql` file with three kinds of placeholder:

    {database}                     the database's name
    {on_cluster}                   nothing, or ON CLUSTER 'name'
    {engine:ReplacingMergeTree}    the engine, or its Replicated twin with Keeper path and replica macros

Files are append-only: `migrations.lock` holds the SHA-256 of each, and a file that no longer matches
it is an error here, before any store sees it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources

LOCK_NAME = "migrations.lock"
_FILE_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_ENGINE = re.compile(r"engine:([A-Za-z]+)")
REPLICA_ARGUMENTS = "'/clickhouse/tables/{uuid}/{shard}', '{replica}'"
"""Keeper path and replica of a replicated table: the server's own default, spelled out. `{uuid}` keeps a
table that is dropped and made anew apart from its old path."""


class MigrationError(ValueError):
    """A migration file, its name, its checksum or its template is not as it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One migration file."""

    version: int
    name: str
    """File name."""
    template: str
    checksum: str
    """SHA-256 of the file, hex."""


def checksum(template: str) -> str:
    """SHA-256 of a migration's text, hex."""
    return hashlib.sha256(template.encode()).hexdigest()


def read_files() -> tuple[Migration, ...]:
    """All migration files in order of version; numbers may have gaps. The lock is not looked at.

    Raises:
        MigrationError: a file's name or number is out of line.
    """
    folder = resources.files("moetrace_schemas.clickhouse") / "migrations"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    migrations = []
    last = 0
    for name in names:
        match = _FILE_NAME.fullmatch(name)
        if match is None or int(match[1]) <= last:
            raise MigrationError(
                f"migration {name}: a name like {last + 1:04d}_<lower_snake_case>.sql expected"
            )
        last = int(match[1])
        template = (folder / name).read_text(encoding="utf-8")
        migrations.append(Migration(version=last, name=name, template=template, checksum=checksum(template)))
    return tuple(migrations)


def read_lock() -> dict[str, str]:
    """Checksums by file name, as locked.

    Raises:
        MigrationError: a line is not `sha256  name`.
    """
    text = (resources.files("moetrace_schemas.clickhouse") / LOCK_NAME).read_text(encoding="utf-8")
    locked = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        fields = line.split()
        if len(fields) != 2:
            raise MigrationError(f"{LOCK_NAME} line {number}: a checksum and a file name expected")
        locked[fields[1]] = fields[0]
    return locked


def migrations() -> tuple[Migration, ...]:
    """All migrations in order, each as the lock says.

    Raises:
        MigrationError: a file is not in the lock, differs from it, or is gone.
    """
    files, locked = read_files(), read_lock()
    for migration in files:
        if locked.get(migration.name) != migration.checksum:
            raise MigrationError(
                f"migration {migration.name} is not as {LOCK_NAME} says: a released migration never changes; "
                "add a new file and run python schemas/generate_tables.py"
            )
    gone = sorted(set(locked) - {migration.name for migration in files})
    if gone:
        raise MigrationError(f"migration {gone[0]} is in {LOCK_NAME} and its file is gone")
    return files


def render(template: str, *, database: str, cluster: str | None = None) -> str:
    """The statement to run.

    Args:
        template: a migration's text.
        database: name of the database.
        cluster: name of a ClickHouse cluster; None for a single node or the embedded engine.

    Raises:
        MigrationError: a name that is not an identifier, or a placeholder that is not known.
    """
    check_identifier("database", database)
    if cluster is not None:
        check_identifier("cluster", cluster)

    def replace(match: re.Match[str]) -> str:
        inner = match[1]
        if inner == "database":
            return database
        if inner == "on_cluster":
            return "" if cluster is None else f"ON CLUSTER '{cluster}'"
        engine = _ENGINE.fullmatch(inner)
        if engine is None:
            raise MigrationError(f"unknown placeholder {{{inner}}} in a migration")
        return engine[1] if cluster is None else f"Replicated{engine[1]}({REPLICA_ARGUMENTS})"

    return _PLACEHOLDER.sub(replace, template)


def create_database(*, database: str, cluster: str | None = None) -> str:
    """The statement that makes the database; runs before the first migration."""
    return render("CREATE DATABASE IF NOT EXISTS {database} {on_cluster}", database=database, cluster=cluster)


def check_identifier(what: str, name: str) -> None:
    """Names go into statements as they are, so only plain identifiers pass.

    Raises:
        MigrationError: not an identifier.
    """
    if _IDENTIFIER.fullmatch(name) is None:
        raise MigrationError(f"{what} {name!r}: a letter or _ and up to 63 of [A-Za-z0-9_] expected")
