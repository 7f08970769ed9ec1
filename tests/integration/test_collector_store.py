"""Migrations on the real embedded engine, each case in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from integration.collector_process import ROOT, environment, moetrace, rows
from moetrace_collectors.ledger import ledger_rows
from moetrace_collectors.sinks import clickhouse_rows
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.clickhouse.render import SHARDING_KEYS, TIME_COLUMNS, migrations

FILLED_BY_OTHERS = {
    "schema_migrations", "runs", "expert_load_minute_rows", "phase_minute_rows", "exchange_minute_rows",
    "rolled_up_minutes", "join_leases",
}  # fmt: skip
"""Tables that the sink of steps does not write: those of migrations, roll-ups and `moetrace join`, and what
materialized views fill."""


def run_python(code: str, *arguments: str) -> str:
    """Run a snippet in a process of its own; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_empty_store_is_migrated_once(tmp_path: Path) -> None:
    """`moetrace migrate` makes all tables, and a second time finds nothing to do."""
    first = moetrace("migrate", "--dir", str(tmp_path))
    assert (first.returncode, first.stdout.count("applied ")) == (0, len(migrations()))
    second = moetrace("migrate", "--dir", str(tmp_path))
    assert (second.returncode, second.stdout.strip().endswith("database moetrace is current")) == (0, True)
    assert rows(tmp_path, "SELECT version FROM schema_migrations FINAL ORDER BY version") == [
        {"version": migration.version} for migration in migrations()
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("(2, '0002_create_phase_spans.sql', 'ffffffffffffffff')", "was applied with checksum ffffffffffff"),
        (
            "(99, '0099_from_the_future.sql', 'abc')",
            "0099_from_the_future.sql, which this moetrace does not know",
        ),
    ],
)
def test_a_store_with_other_migrations_is_refused(tmp_path: Path, change: str, message: str) -> None:
    """A tampered checksum and an unknown version stop migrate and collect with one line and exit code 2."""
    assert moetrace("migrate", "--dir", str(tmp_path)).returncode == 0
    run_python(
        "import sys, chdb; chdb.connect(sys.argv[1]).query(sys.argv[2])",
        str((tmp_path / "store").resolve()),
        f"INSERT INTO moetrace.schema_migrations (version, name, checksum) VALUES {change}",
    )
    for command in (("migrate",), ("collect", "--http-port", "0", "--grpc-port", "0")):
        done = moetrace(*command, "--dir", str(tmp_path))
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_the_engine_parses_what_a_cluster_would_run() -> None:
    """Every statement rendered for a cluster is valid ClickHouse DDL with replicated engines."""
    code = """
import json
import chdb
from moetrace_schemas.clickhouse.render import TIME_COLUMNS, create_database, migrations, time_to_live
from moetrace_schemas.clickhouse.render import statements as rendered
connection = chdb.connect(":memory:")
options = {"database": "moetrace", "cluster": "main"}
statements = [create_database(**options)]
statements += [statement for item in migrations() for statement in rendered(item.template, **options)]
statements += [time_to_live(table, days, **options) for table in TIME_COLUMNS for days in (0, 7)]
trees = [connection.query(f"EXPLAIN AST {statement}", "TSVRaw").bytes().decode() for statement in statements]
print(json.dumps(list(zip(statements, trees))))
"""
    pairs = json.loads(run_python(code))
    kinds: dict[str, int] = {}
    for statement, tree in pairs:
        kind = tree.split()[0]
        kinds[kind] = kinds.get(kind, 0) + 1
        assert kind in ("CreateQuery", "AlterQuery", "InsertQuery", "DropQuery"), statement
        assert kind == "InsertQuery" or "ON CLUSTER 'main'" in statement
        if statement.startswith("CREATE TABLE") and "Distributed" not in statement:
            assert "Replicated" in statement
            assert "MergeTree" in tree
    for name in SHARDING_KEYS:
        assert any(f"'moetrace', '{name}_local'" in statement for statement, _ in pairs), name
    assert (kinds["InsertQuery"], kinds["DropQuery"]) == (4, 3)
    changes = sum(item.template.startswith("ALTER") for item in migrations())
    assert kinds["AlterQuery"] == changes + 2 * len(TIME_COLUMNS)


def test_generated_tables_are_current() -> None:
    """migrations.lock, schema.sql and TABLES.md are what the migrations make."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "schemas" / "generate_tables.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_rows_fill_every_column_of_their_tables() -> None:
    """The sink writes exactly the columns that the migrations make; only defaults are left out."""
    schema = (ROOT / "schemas" / "moetrace_schemas" / "clickhouse" / "schema.sql").read_text()
    tables: dict[str, list[str]] = {}
    for part in re.split(r"\n\n(?=CREATE )", schema)[1:]:
        first, _, body = part.partition("\n")
        if not first.startswith("CREATE TABLE moetrace."):
            continue
        name = first.removeprefix("CREATE TABLE moetrace.")
        tables[name] = [line.split("`")[1] for line in body.splitlines() if line.startswith("    `")]
    rank_steps = SyntheticRun(world_size=1).step(0)
    filled = set()
    for written in (
        *clickhouse_rows.unjoined_rows(rank_steps, received_unix_ms=0),
        *clickhouse_rows.verdict_rows([]),
        clickhouse_rows.event_rows([]),
    ):
        by_store = {"stored_at"} if written.table == "rank_step_arrivals" else set()
        assert list(written.names) == [name for name in tables[written.table] if name not in by_store]
        filled.add(written.table)
    # The ledger is written row by row, in an order of its own.
    assert set(ledger_rows.LEDGER_COLUMNS) == set(tables[ledger_rows.LEDGER_TABLE])
    assert list(ledger_rows.SLOT_COLUMNS) == tables[ledger_rows.SLOTS_TABLE]
    filled |= {ledger_rows.LEDGER_TABLE, ledger_rows.SLOTS_TABLE}
    assert tables.keys() - filled == FILLED_BY_OTHERS


def test_print_shows_what_would_run() -> None:
    """`moetrace migrate --print --cluster` writes the statements for a database administrator to run."""
    done = moetrace("migrate", "--print", "--cluster", "main", "--database", "moe")
    assert done.returncode == 0
    assert done.stdout.startswith("CREATE DATABASE IF NOT EXISTS moe ON CLUSTER 'main';")
    assert "CREATE TABLE IF NOT EXISTS moe.phase_spans_local ON CLUSTER 'main'" in done.stdout
    assert "ENGINE = Distributed('main', 'moe', 'phase_spans_local', cityHash64(run_id, step))" in done.stdout


def test_rows_are_kept_as_long_as_told(tmp_path: Path) -> None:
    """`moetrace migrate --ttl` changes the time to live of one table, again and again, or takes it away."""
    for days, kept in (("7", "toIntervalDay(7)"), ("0", ""), ("9", "toIntervalDay(9)")):
        done = moetrace("migrate", "--dir", str(tmp_path), "--ttl", f"phase_spans={days}")
        assert done.returncode == 0, done.stderr
        [table] = rows(tmp_path, "SELECT engine_full FROM system.tables WHERE name = 'phase_spans'")
        assert ("TTL" in str(table["engine_full"])) == bool(kept)
        assert kept in str(table["engine_full"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("migrate",), "which store? give --dir DIR, --dsn DSN, or --print"),
        (("migrate", "--dsn", "nonsense"), "store dsn 'nonsense'"),
        (("migrate", "--print", "--ttl", "phase_spans"), "--ttl phase_spans: TABLE=DAYS expected"),
        (("migrate", "--dir", "/tmp", "--ttl", "nothing=3"), "ttl of 'nothing': one of collector_events"),
        (("migrate", "--print", "--database", "a b"), "database 'a b'"),
        (("collect", "--host", "0.0.0.0"), "add tls_certificate and tls_key, and token_file"),
        (("collect", "--http-port", "99999"), "http_port = 99999: 0 to 65535 expected"),
        (("collect", "--config", "/nowhere.toml"), "cannot read /nowhere.toml"),
        (("collect", "--dir", "/proc/nowhere", "--http-port", "0"), "cannot write to /proc/nowhere"),
        (("query", "SELECT 1", "--url", "127.0.0.1"), "a collector's address as in http://127.0.0.1:4318"),
        (("query", "SELECT 1", "--url", "http://127.0.0.1:1"), "no collector answers at http://127.0.0.1:1"),
        (("query", "SELECT 1", "--dir", "/nowhere"), "/nowhere is not a directory"),
        (("query", "SELECT 1", "--dsn", "chdb:///nowhere/store"), "no store at chdb:///nowhere/store"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    """A mistake is one line that names it, and exit code 2; never a traceback."""
    done = moetrace(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("moetrace: ")
    assert len(done.stderr.splitlines()) == 1
