"""Upgrades a store from every earlier version with rows in it; prints what it held before and after as JSON.

`python -m upgrade_every_version`. Each version gets a database of its own in one engine: the migrations up to
that version, rows in every table that it has, then the rest of the migrations.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ledger_builders import MemoryLedger, report
from moetrace_collectors.events import CollectorEvent, EventKind
from moetrace_collectors.ledger import ledger_rows
from moetrace_collectors.ledger.recorder import Recorder
from moetrace_collectors.migrate import migrate
from moetrace_collectors.model import (
    CoactivationColumns,
    JoinedStep,
    RankStep,
    ViolationCount,
    WaitCycles,
)
from moetrace_collectors.roll_ups.roll_up import RollUp, RollUpSettings
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse_columns import TableColumns
from moetrace_collectors.sinks.clickhouse_rows import TableRows, event_rows, unjoined_rows, verdict_rows
from moetrace_collectors.store import embedded_dsn, open_client, parse_store
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_schemas.clickhouse.render import create_database, migrations, statements
from moetrace_schemas.enums import PHASE_CODE, ClosedBy, Phase

RUN = SyntheticRun(run_id="upgraded", world_size=3, slow_rank=1)
NUM_STEPS = 3
START_MS = RUN.start_unix_ns // 1_000_000
INTERRUPTED_AT = 8
MINUTES = """
SELECT (SELECT (sum(count), min(source_rows) > 0) FROM {database}.expert_load_minutes),
       (SELECT (sum(intervals), sum(duration_ns), min(source_rows) > 0) FROM {database}.phase_minutes),
       (SELECT (sum(exchanges), sum(wait_ns), min(source_rows) > 0) FROM {database}.exchange_minutes)
"""
"""Sums of the roll-ups, and whether they say of how many rows they are."""


def tables() -> list[TableColumns | TableRows]:
    """Rows of three steps, of an event and of a placement, for every table that collectors fill."""
    engine = VerdictEngine()
    results = []
    for step in range(NUM_STEPS):
        joined = JoinedStep(
            run_id=RUN.run_id,
            step=step,
            world_size=RUN.world_size,
            rank_steps=tuple(map(with_everything, RUN.step(step))),
            missing_ranks=(),
            closed_by=ClosedBy.COMPLETE,
        )
        results.append(StepResult(joined=joined, verdict=engine.judge(joined), loads=()))
    rank_steps = [rank_step for result in results for rank_step in result.joined.rank_steps]
    *of_ranks, arrivals = unjoined_rows(rank_steps, received_unix_ms=0)
    assert isinstance(arrivals, TableRows)
    event = CollectorEvent(time_unix_ms=START_MS, kind=EventKind.STARTED, reason="", run_id=RUN.run_id)
    return [
        *of_ranks,
        *verdict_rows(results),
        # Else old versions, in which the store does not put its time in, would have it expire.
        TableRows(
            table=arrivals.table,
            names=(*arrivals.names, "stored_at"),
            columns=(*arrivals.columns, [START_MS] * len(arrivals)),
        ),
        event_rows([event]),
        *placement_rows(),
    ]


def with_everything(rank_step: RankStep) -> RankStep:
    """The same with all that a rank may send beside phases, counts and traffic."""
    counts = rank_step.experts[0]
    pair = dict.fromkeys(("layer", "span", "first", "second", "count"), np.array([1], dtype=np.int64))
    return replace(
        rank_step,
        unfolded=(counts,),
        violations=(ViolationCount(layer=0, violation=0, count=3),),
        coactivation=CoactivationColumns(**pair),
        waits=(WaitCycles(phase=PHASE_CODE[Phase.DISPATCH], cycles=np.arange(RUN.world_size)),),
    )


def placement_rows() -> tuple[TableRows, TableRows]:
    """An announced placement: its row of the ledger, and its slots."""
    ledger = MemoryLedger()
    told = report(1, run_id=RUN.run_id)
    Recorder(ledger, unix_ms=lambda: START_MS).record(told)
    values = [ledger_rows.ledger_values(row) for row in ledger.of_run(RUN.run_id)]
    return (
        TableRows(
            table=ledger_rows.LEDGER_TABLE,
            names=ledger_rows.LEDGER_COLUMNS,
            columns=tuple(map(list, zip(*values, strict=True))),
        ),
        TableRows(
            table=ledger_rows.SLOTS_TABLE,
            names=ledger_rows.SLOT_COLUMNS,
            columns=tuple(ledger_rows.slot_columns(RUN.run_id, 1, told.mapping)),
        ),
    )


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
    """Rows and a checksum over some of their columns, whatever their order; each once where repeats merge."""
    [[engine]] = client.query(
        f"SELECT engine FROM system.tables WHERE database = '{database}' AND name = '{table}'"
    ).result_rows
    final = "" if engine == "MergeTree" else "FINAL"
    found = client.query(
        f"SELECT count(), sum(cityHash64(toString(tuple({', '.join(names)})))) "
        f"FROM {database}.{table} {final}"
    )
    return list(found.result_rows[0])


def filled(client: Any, database: str) -> list[str]:
    """Tables that hold rows."""
    found = client.query(
        f"SELECT name FROM system.tables WHERE database = '{database}' AND total_rows > 0 ORDER BY name"
    )
    return [str(name) for (name,) in found.result_rows]


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
                "filled": filled(client, database),
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
