"""Upgrades a store from every earlier version with rows in it; prints what it held before and after as JSON.

`python -m upgrade_every_version`. Each version gets a database of its own in one engine: the migrations up to
that version, rows in every table that it has, then the rest of the migrations.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from moetrace_collectors.migrate import migrate
from moetrace_collectors.model import JoinedStep
from moetrace_collectors.roll_ups.roll_up import RollUp, RollUpSettings
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse_columns import TableColumns
from moetrace_collectors.sinks.clickhouse_rows import TableRows, rank_step_rows, verdict_rows
from moetrace_collectors.store import embedded_dsn, open_client, parse_store
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_schemas.clickhouse.render import create_database, migrations, statements
from moetrace_schemas.enums import ClosedBy

RUN = SyntheticRun(run_id="upgraded", world_size=3, slow_rank=1)
NUM_STEPS = 3
INTERRUPTED_AT = 8
MINUTES = """
SELECT (SELECT (sum(count), min(source_rows) > 0) FROM {database}.expert_load_minutes),
       (SELECT (sum(intervals), sum(duration_ns), min(source_rows) > 0) FROM {database}.phase_minutes),
       (SELECT (sum(exchanges), sum(wait_ns), min(source_rows) > 0) FROM {database}.exchange_minutes)
"""
"""Sums of the roll-ups, and whether they say of how many rows they are."""


def tables() -> list[TableColumns | TableRows]:
    """Rows of three steps, for every table that a collector fills."""
    engine = VerdictEngine()
    results = []
    for step in range(NUM_STEPS):
        joined = JoinedStep(
            run_id=RUN.run_id,
            step=step,
            world_size=RUN.world_size,
            rank_steps=RUN.step(step),
            missing_ranks=(),
            closed_by=ClosedBy.COMPLETE,
        )
        results.append(StepResult(joined=joined, verdict=engine.judge(joined), loads=()))
    rank_steps = [rank_step for result in results for rank_step in result.joined.rank_steps]
    return [*rank_step_rows(rank_steps, late=False, received_unix_ms=0), *verdict_rows(results)]


def columns(client: Any, database: str, table: str) -> list[str]:
    """Names of a table's columns; empty where there is no such table."""
    found = client.query(
        f"SELECT name FROM system.columns WHERE database = '{database}' AND table = '{table}' "
        "ORDER BY position"
    )
    return [str(name) for (name,) in found.result_rows]


def insert(client: Any, database: str, table: TableColumns | TableRows, names: list[str]) -> None:
    """Insert some of the columns, as the sink does."""
    if isinstance(table, TableColumns):
        client.insert_arrow(table.table, table.arrow.select(names), database=database)
        return
    data = [table.columns[table.names.index(name)] for name in names]
    client.insert(table.table, data, column_names=names, database=database, column_oriented=True)


def digest(client: Any, database: str, table: str, names: list[str]) -> list[Any]:
    """Rows and a checksum over some of their columns, whatever their order."""
    found = client.query(
        f"SELECT count(), sum(cityHash64(toString(tuple({', '.join(names)})))) FROM {database}.{table} FINAL"
    )
    return list(found.result_rows[0])


def minutes(client: Any, database: str) -> list[Any]:
    """What the roll-ups of an upgraded store hold."""
    [found] = client.query(MINUTES.replace("{database}", database)).result_rows
    return [list(one) for one in found]


def main() -> None:
    """Upgrade from every version."""
    known = migrations()
    rows = tables()
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        client = open_client(parse_store(embedded_dsn(Path(directory) / "store")))
        for number, last in enumerate(known[1:], start=2):
            database = f"from_{last.version:04d}"
            client.command(create_database(database=database))
            for migration in known[:number]:
                for statement in statements(migration.template, database=database):
                    client.command(statement)
                client.insert(
                    f"{database}.schema_migrations",
                    [[migration.version, migration.name, migration.checksum]],
                    column_names=["version", "name", "checksum"],
                )
            before: dict[str, tuple[list[str], list[Any]]] = {}
            for table in rows:
                there = columns(client, database, table.table)
                names = [name for name in table.names if name in there]
                if not names or not len(table):
                    continue
                insert(client, database, table, names)
                if table.table != "rank_steps":
                    # Delivered twice: what is summed as rows are written counts it twice.
                    insert(client, database, table, names)
                before[table.table] = (names, digest(client, database, table.table, names))
            applied = [migration.version for migration in migrate(client, database=database)]
            # An upgrade that was interrupted behind its last statement runs that statement again.
            for migration in known[number:] if last.version == INTERRUPTED_AT else ():
                for statement in statements(migration.template, database=database):
                    client.command(statement)
            upgraded = minutes(client, database)
            RollUp(client, RollUpSettings(database=database, look_back_ms=0)).turn(everything=True)
            told[database] = {
                "minutes": upgraded,
                "rolled_up": minutes(client, database),
                "applied": applied,
                "before": {name: found for name, (_, found) in before.items()},
                "after": {name: digest(client, database, name, names) for name, (names, _) in before.items()},
                "runs": client.query(
                    f"SELECT run_id, world_size, last_step FROM {database}.v_runs"
                ).result_rows,
                "barriers": client.query(
                    f"SELECT count(), sum(extension_ns), min(releaser_rank) FROM {database}.v_step_barriers"
                ).result_rows[0],
            }
            # Hundreds of open tables make each further one slower.
            client.command(f"DROP DATABASE {database}")
        client.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
