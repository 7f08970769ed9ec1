"""Migration files are locked, templates render for one node and for a cluster, surprises are refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moetrace_collectors.errors import UsageError
from moetrace_collectors.migrate import migrate
from moetrace_schemas.clickhouse import render
from moetrace_schemas.clickhouse.render import MigrationError, migrations

TEMPLATE = "CREATE TABLE {database}.t {on_cluster} (a Int8) ENGINE = {engine:ReplacingMergeTree} ORDER BY a"


def test_every_migration_is_locked() -> None:
    """The files that ship are those of migrations.lock, in order; numbers may have gaps."""
    versions = [migration.version for migration in migrations()]
    assert versions == sorted(set(versions))
    assert {migration.name for migration in migrations()} == set(render.read_lock())


def test_two_files_of_one_number_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two branches that took the same number are told so before a store sees either."""
    (tmp_path / "migrations").mkdir()
    for name in ("0001_one.sql", "0001_other.sql"):
        (tmp_path / "migrations" / name).write_text("SELECT 1")
    monkeypatch.setattr(render.resources, "files", lambda package: tmp_path)
    with pytest.raises(MigrationError, match=r"0001_other\.sql: number 1 is taken"):
        render.read_files()


def test_one_node_gets_plain_engines() -> None:
    """Without a cluster the template renders to the engine as it is named."""
    assert render.render(TEMPLATE, database="moetrace") == (
        "CREATE TABLE moetrace.t  (a Int8) ENGINE = ReplacingMergeTree ORDER BY a"
    )


def test_a_cluster_gets_replicated_engines() -> None:
    """With a cluster the same template renders to ON CLUSTER and the replicated twin."""
    assert render.statements(TEMPLATE, database="moetrace", cluster="main") == (
        "CREATE TABLE moetrace.t ON CLUSTER 'main' (a Int8) "
        "ENGINE = ReplicatedReplacingMergeTree('/clickhouse/tables/{uuid}/all', '{shard}-{replica}') "
        "ORDER BY a",
    )


def test_a_column_of_versions_goes_into_the_engine() -> None:
    """An engine's own argument stands alone on one node and behind path and replica on a cluster."""
    template = TEMPLATE.replace("MergeTree}", "MergeTree:a}")
    assert "ENGINE = ReplacingMergeTree(a) ORDER BY a" in render.render(template, database="d")
    assert "'{shard}-{replica}', a) ORDER BY a" in render.render(template, database="d", cluster="main")


def test_the_time_to_live_of_a_view_is_that_of_its_rows() -> None:
    """Roll-ups are known by the names of their views; their rows expire."""
    assert render.time_to_live("phase_minutes", 7, database="d") == (
        "ALTER TABLE d.phase_minute_rows  MODIFY TTL toDateTime(minute) + INTERVAL 7 DAY"
    )


def test_a_sharded_table_gets_a_distributed_twin() -> None:
    """Rows go to the shard of their step; the name that readers know is the Distributed table."""
    template = TEMPLATE.replace(".t ", ".phase_spans ")
    assert render.statements(template, database="moe", cluster="main") == (
        "CREATE TABLE moe.phase_spans_local ON CLUSTER 'main' (a Int8) "
        "ENGINE = ReplicatedReplacingMergeTree('/clickhouse/tables/{uuid}/{shard}', '{replica}') ORDER BY a",
        "CREATE OR REPLACE TABLE moe.phase_spans ON CLUSTER 'main' AS moe.phase_spans_local "
        "ENGINE = Distributed('main', 'moe', 'phase_spans_local', cityHash64(run_id, step))",
    )


def test_a_view_joins_on_its_own_shard() -> None:
    """A view reads the shard's tables, and its Distributed twin asks every shard."""
    template = "CREATE OR REPLACE VIEW {database}.v_traffic {on_cluster} AS SELECT 1 FROM {local:rank_steps}"
    assert render.statements(template, database="moe") == (
        "CREATE OR REPLACE VIEW moe.v_traffic  AS SELECT 1 FROM moe.rank_steps",
    )
    assert render.statements(template, database="moe", cluster="main") == (
        "CREATE OR REPLACE VIEW moe.v_traffic_local ON CLUSTER 'main' AS SELECT 1 FROM moe.rank_steps_local",
        "CREATE OR REPLACE TABLE moe.v_traffic ON CLUSTER 'main' "
        "ENGINE = Distributed('main', 'moe', 'v_traffic_local')",
    )


def test_every_table_is_sharded_or_whole_on_purpose() -> None:
    """Every table or view that a migration makes is in SHARDING_KEYS, or is one of the few that are not."""
    made = {
        match[1]
        for migration in migrations()
        if (match := re.search(r"\{database\}\.(\w+) \{on_cluster\}", migration.template))
    }
    whole = {name for name in made - set(render.SHARDING_KEYS) if not name.endswith("_mv")}
    assert whole <= {
        "schema_migrations",
        "placement_ledger",
        "placement_slots",
        "v_runs",
        "rolled_up_minutes",
        "join_leases",
    }
    assert set(render.SHARDING_KEYS) <= made
    assert set(render.TIME_COLUMNS) <= made


@pytest.mark.parametrize(
    ("table", "days", "message"),
    [
        ("nothing", 3, "ttl of 'nothing': one of"),
        ("phase_spans", -1, "0 to 36500 days"),
        ("runs", 10**6, "0 to"),
    ],
)
def test_a_time_to_live_that_cannot_be_is_refused(table: str, days: int, message: str) -> None:
    """The message names the table and what is possible."""
    with pytest.raises(MigrationError, match=message):
        render.time_to_live(table, days, database="d")


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "a'; DROP", "x" * 65])
def test_names_that_are_no_identifiers_are_refused(name: str) -> None:
    """Names go into statements as they are, so they must be plain."""
    with pytest.raises(MigrationError, match="database"):
        render.render(TEMPLATE, database=name)
    with pytest.raises(MigrationError, match="cluster"):
        render.render(TEMPLATE, database="d", cluster=name)


def test_an_unknown_placeholder_is_refused() -> None:
    """A typing mistake in a template does not reach a store."""
    with pytest.raises(MigrationError, match=r"unknown placeholder \{engin:X\}"):
        render.render("{engin:X}", database="d")


def test_a_changed_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration that differs from the lock stops everything before a store is touched."""
    locked = {migration.name: migration.checksum for migration in render.read_files()}
    locked["0002_create_phase_spans.sql"] = "0" * 64
    monkeypatch.setattr(render, "read_lock", lambda: locked)
    with pytest.raises(MigrationError, match=r"0002_create_phase_spans\.sql is not as migrations\.lock says"):
        migrations()


@dataclass
class Result:
    """What a client's query returns."""

    result_rows: list[list[Any]]


@dataclass
class FakeEngine:
    """Remembers statements, and holds what schema_migrations holds."""

    applied: list[list[Any]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def command(self, cmd: str) -> None:
        """Remember a statement."""
        self.commands.append(cmd)

    def query(self, query: str) -> Result:
        """Answer the two queries that a migration asks."""
        if "system.tables" in query:
            return Result([[1 if self.applied else 0]])
        return Result([list(row) for row in self.applied])

    def insert(self, table: str, data: list[list[Any]], column_names: list[str]) -> None:
        """Record an applied migration."""
        self.applied += data


def test_an_empty_store_gets_all_and_a_current_one_nothing() -> None:
    """Migrations are applied in order, once."""
    engine = FakeEngine()
    assert migrate(engine, database="d") == migrations()
    expected = [s for m in migrations() for s in render.statements(m.template, database="d")]
    assert engine.commands[1:] == expected
    assert migrate(engine, database="d") == ()


def test_an_interrupted_migration_goes_on_where_it_stopped() -> None:
    """A store that has the first two gets the rest."""
    engine = FakeEngine([[m.version, m.name, m.checksum] for m in migrations()[:2]])
    assert migrate(engine, database="d") == migrations()[2:]


def test_a_newer_store_is_left_alone() -> None:
    """A migration that this package does not know stops it, naming the fix."""
    engine = FakeEngine([[m.version, m.name, m.checksum] for m in migrations()])
    engine.applied.append([99, "0099_later.sql", "0" * 64])
    with pytest.raises(UsageError, match=r"0099_later\.sql.*upgrade moetrace"):
        migrate(engine, database="d")


def test_a_tampered_checksum_is_refused() -> None:
    """A store whose migration had another text is not touched."""
    engine = FakeEngine([[m.version, m.name, m.checksum] for m in migrations()[:1]])
    engine.applied[0][2] = "f" * 64
    with pytest.raises(UsageError, match="applied with checksum ffffffffffff"):
        migrate(engine, database="d")
    assert len(engine.commands) == 1
