"""Lists the migrations that ship with the package and renders their templates. Standard library only.

A migration is one statement in one `.sql` file with four kinds of placeholder:

    {database}                     the database's name
    {on_cluster}                   nothing, or ON CLUSTER 'name'
    {engine:ReplacingMergeTree}    the engine, or its Replicated twin with Keeper path and replica macros;
                                   {engine:ReplacingMergeTree:column} with a column of versions
    {local:phase_spans}            the table, or the part of it on the same shard

On a cluster the sharded tables and views of SHARDING_KEYS exist twice: `phase_spans_local` on every node,
made by the migration's own statement, and `phase_spans`, Distributed over it, made by a second one. All
rows of a step lie on one shard, so a view joins what is on its own shard, and its Distributed twin is
the union::

    v_step_barriers (Distributed)  =  union over shards of  v_step_barriers_local
                                                             |  reads phase_spans_local, rank_steps_local

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
_ENGINE = re.compile(r"engine:([A-Za-z]+)(?::([a-z0-9_]+))?")
_LOCAL = re.compile(r"local:([a-z0-9_]+)")
_TARGET = re.compile(r"\{database\}\.([a-z0-9_]+) \{on_cluster\}")
"""What a statement makes or changes."""
REPLICA_ARGUMENTS = "'/clickhouse/tables/{uuid}/{shard}', '{replica}'"
"""Keeper path and replica of a sharded table: the server's own default, spelled out. `{uuid}` keeps a
table that is dropped and made anew apart from its old path."""
UNSHARDED_ARGUMENTS = "'/clickhouse/tables/{uuid}/all', '{shard}-{replica}'"
"""The same for a table that every node holds whole."""
LOCAL_SUFFIX = "_local"

_BY_STEP = "cityHash64(run_id, step)"
_BY_MINUTE = "cityHash64(run_id, minute)"
"""A minute that is rolled up again must come to the shard that has it, or it would be there twice."""
SHARDING_KEYS: dict[str, str] = {
    "phase_spans": _BY_STEP,
    "expert_loads": _BY_STEP,
    "rank_traffic": _BY_STEP,
    "rank_steps": _BY_STEP,
    "step_verdicts": _BY_STEP,
    "step_barriers": _BY_STEP,
    "routing_violations": _BY_STEP,
    "expert_coactivation": _BY_STEP,
    "rank_waits": _BY_STEP,
    "rank_step_arrivals": _BY_STEP,
    "unfolded_expert_loads": _BY_STEP,
    "collector_events": "rand()",
    "runs": "cityHash64(run_id)",
    "expert_load_minute_rows": _BY_MINUTE,
    "phase_minute_rows": _BY_MINUTE,
    "exchange_minute_rows": _BY_MINUTE,
    "expert_load_minutes": "",
    "phase_minutes": "",
    "exchange_minutes": "",
    "v_step_exchanges": "",
    "v_step_barriers": "",
    "v_step_verdicts": "",
    "v_expert_heatmap": "",
    "v_layer_loads": "",
    "v_traffic": "",
    "v_backward_traffic": "",
    "v_expected_traffic": "",
}
"""Tables and views that a cluster holds in shards, and where an inserted row goes; every other table is on
every node whole. A view is only read, so it has no key."""

TIME_COLUMNS: dict[str, str] = {
    "phase_spans": "start_time",
    "expert_loads": "step_time",
    "rank_traffic": "step_time",
    "rank_steps": "start_time",
    "step_verdicts": "step_time",
    "step_barriers": "step_time",
    "routing_violations": "step_time",
    "expert_coactivation": "step_time",
    "rank_waits": "step_time",
    "rank_step_arrivals": "stored_at",
    "unfolded_expert_loads": "step_time",
    "collector_events": "time",
    "runs": "last_step_time",
    "expert_load_minute_rows": "minute",
    "phase_minute_rows": "minute",
    "exchange_minute_rows": "minute",
    "rolled_up_minutes": "minute",
    "join_leases": "beat_at",
}
"""Tables whose rows have a time to live, and the column that it counts from."""
ROWS_OF_VIEWS: dict[str, str] = {
    "expert_load_minutes": "expert_load_minute_rows",
    "phase_minutes": "phase_minute_rows",
    "exchange_minutes": "exchange_minute_rows",
}
"""Views that people know by name, and the table that holds their rows."""
MAX_DAYS = 36_500


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
    """All migration files in order of version; gaps are fine, twins are not; the lock is not looked at.

    Raises:
        MigrationError: a file's name or number is out of line.
    """
    folder = resources.files("moetrace_schemas.clickhouse") / "migrations"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    migrations: list[Migration] = []
    for name in names:
        match = _FILE_NAME.fullmatch(name)
        if match is None:
            raise MigrationError(f"migration {name}: name NNNN_<lower_snake_case>.sql expected")
        version = int(match[1])
        if version == 0 or (migrations and version == migrations[-1].version):
            raise MigrationError(f"migration {name}: number {version} is taken or is none; count on")
        template = (folder / name).read_text(encoding="utf-8")
        migrations.append(
            Migration(version=version, name=name, template=template, checksum=checksum(template))
        )
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


def statements(template: str, *, database: str, cluster: str | None = None) -> tuple[str, ...]:
    """The statements to run for one migration, in order.

    On a cluster a sharded table or view is followed by its Distributed twin, which is made anew when the
    table changes.

    Raises:
        MigrationError: as for `render`.
    """
    statement = render(template, database=database, cluster=cluster)
    target = _TARGET.search(template)
    if cluster is None or target is None or target[1] not in SHARDING_KEYS:
        return (statement,)
    name, key = target[1], SHARDING_KEYS[target[1]]
    # The columns of a view cannot be copied; Distributed then asks the shards for them.
    columns = f" AS {database}.{name}{LOCAL_SUFFIX}" if key else ""
    arguments = f"'{cluster}', '{database}', '{name}{LOCAL_SUFFIX}'" + (f", {key}" if key else "")
    return (
        statement,
        f"CREATE OR REPLACE TABLE {database}.{name} ON CLUSTER '{cluster}'{columns} "
        f"ENGINE = Distributed({arguments})",
    )


def render(template: str, *, database: str, cluster: str | None = None) -> str:
    """The migration's own statement.

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
    target = _TARGET.search(template)
    sharded = target is not None and target[1] in SHARDING_KEYS

    def replace(match: re.Match[str]) -> str:
        inner = match[1]
        if inner == "database":
            return database
        if inner == "on_cluster":
            return "" if cluster is None else f"ON CLUSTER '{cluster}'"
        local = _LOCAL.fullmatch(inner)
        if local is not None:
            return f"{database}.{_on_shard(local[1], cluster)}"
        engine = _ENGINE.fullmatch(inner)
        if engine is None:
            raise MigrationError(f"unknown placeholder {{{inner}}} in a migration")
        arguments = [engine[2]] if engine[2] else []
        if cluster is None:
            return engine[1] + (f"({arguments[0]})" if arguments else "")
        arguments.insert(0, REPLICA_ARGUMENTS if sharded else UNSHARDED_ARGUMENTS)
        return f"Replicated{engine[1]}({', '.join(arguments)})"

    if cluster is not None and target is not None:
        on_shard = f"{{database}}.{_on_shard(target[1], cluster)} {{on_cluster}}"
        template = template[: target.start()] + on_shard + template[target.end() :]
    return _PLACEHOLDER.sub(replace, template)


def _on_shard(name: str, cluster: str | None) -> str:
    return name + LOCAL_SUFFIX if cluster is not None and name in SHARDING_KEYS else name


def time_to_live(table: str, days: int, *, database: str, cluster: str | None = None) -> str:
    """The statement that keeps a table's rows for so many days; 0 keeps them for ever.

    Raises:
        MigrationError: a table without a time to live, or days out of range.
    """
    table = ROWS_OF_VIEWS.get(table, table)
    if table not in TIME_COLUMNS:
        raise MigrationError(f"ttl of {table!r}: one of {', '.join(sorted(TIME_COLUMNS))} expected")
    if not 0 <= days <= MAX_DAYS:
        raise MigrationError(f"ttl of {table} = {days}: 0 to {MAX_DAYS} days expected")
    time = TIME_COLUMNS[table]
    action = f"MODIFY TTL toDateTime({time}) + INTERVAL {days} DAY" if days else "REMOVE TTL"
    template = f"ALTER TABLE {{database}}.{table} {{on_cluster}} {action}"
    return render(template, database=database, cluster=cluster)


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
