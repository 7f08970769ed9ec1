"""What roll-ups by minute cost: summed as rows are written (materialized views), or beside the inserts.

The same Arrow tables go, in turn, into a database with the materialized views that earlier versions had and
into one of today, again and again; times are the best of the rounds, per row. In a third one, which has each
row once, the minutes are rolled up as a collector's thread does, and read as the heat map reads them.

    python benchmarks/roll_ups.py [--ranks 64] [--layers 61] [--steps 8] [--rounds 5] [--write]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from results import write_section

from moetrace_collectors.migrate import migrate
from moetrace_collectors.roll_ups.roll_up import RollUp, RollUpSettings
from moetrace_collectors.simulate import Clocks, Noise, SimulatedRun, simulate
from moetrace_collectors.sinks.clickhouse import INSERT_SETTINGS
from moetrace_collectors.sinks.clickhouse_columns import TableColumns
from moetrace_collectors.sinks.clickhouse_rows import TableRows, rank_step_rows
from moetrace_collectors.store import embedded_dsn, open_client, parse_store
from moetrace_schemas.clickhouse.render import migrations, statements

LAST_SUMMING = 79
"""Version of the schema up to which materialized views filled the roll-ups."""
SUMMING, TODAY, ONCE = "summing", "moetrace", "once"
COMPARED = ("phase_spans", "expert_loads")
HEAT_MAP = (
    "SELECT layer, expert, sum(count) FROM {database}.expert_load_minutes "
    "WHERE count_kind = 'routed' GROUP BY layer, expert"
)


def tables(ranks: int, layers: int, steps: int) -> list[TableColumns | TableRows]:
    """Rows of a simulated run."""
    run = SimulatedRun(
        run_id="roll-ups",
        num_ranks=ranks,
        num_layers=layers,
        num_experts=max(64, ranks),
        num_steps=steps,
        noise=Noise(spread=0.05),
        clocks=Clocks(offset_ns=1e6),
    )
    rank_steps = [one for step in simulate(run) for one in step.joined.rank_steps]
    return list(rank_step_rows(rank_steps, late=False, received_unix_ms=time.time_ns() // 1_000_000))


def insert_s(client: Any, database: str, table: TableColumns | TableRows) -> float:
    """Time of one insert."""
    began = time.perf_counter()
    if isinstance(table, TableColumns):
        client.insert_arrow(table.table, table.arrow, database=database, settings=INSERT_SETTINGS)
    else:
        client.insert(
            table.table,
            list(table.columns),
            column_names=list(table.names),
            database=database,
            column_oriented=True,
            settings=INSERT_SETTINGS,
        )
    return time.perf_counter() - began


def with_summing_views(client: Any) -> None:
    """A database as an earlier version made it."""
    client.command(f"CREATE DATABASE {SUMMING}")
    for migration in migrations():
        if migration.version <= LAST_SUMMING:
            for statement in statements(migration.template, database=SUMMING):
                client.command(statement)


def measure(client: Any, rows: list[TableColumns | TableRows], rounds: int) -> list[str]:
    """Lines of the table of results."""
    lines = ["| | rows | views, ns a row | now, ns a row | ratio |", "|---|---|---|---|---|"]
    for table in (one for one in rows if one.table in COMPARED):
        best = {SUMMING: float("inf"), TODAY: float("inf")}
        for _ in range(rounds):
            for database in best:
                best[database] = min(best[database], insert_s(client, database, table))
        of_row = {database: seconds / len(table) * 1e9 for database, seconds in best.items()}
        ratio = best[TODAY] / best[SUMMING]
        lines.append(
            f"| insert into `{table.table}` | {len(table)} | {of_row[SUMMING]:.0f} | {of_row[TODAY]:.0f} "
            f"| {ratio:.2f} |"
        )
    migrate(client, database=ONCE)
    for table in (one for one in rows if len(one)):
        insert_s(client, ONCE, table)
    num_rows = sum(len(table) for table in rows if table.table in COMPARED)
    began = time.perf_counter()
    num_minutes = RollUp(client, RollUpSettings(database=ONCE)).turn(everything=True)
    took_s = time.perf_counter() - began
    lines.append(
        f"| roll up both, {num_minutes} minutes, by one thread | {num_rows} | - "
        f"| {took_s / num_rows * 1e9:.0f} | - |"
    )
    began = time.perf_counter()
    found = client.query(HEAT_MAP.replace("{database}", ONCE)).row_count
    took_s = time.perf_counter() - began
    lines.append(f"| heat map of the roll-up, {found} cells, ms | - | - | {took_s * 1e3:.1f} | - |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of roll-ups by minute.")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    arguments = parser.parse_args()
    rows = tables(arguments.ranks, arguments.layers, arguments.steps)
    with tempfile.TemporaryDirectory() as directory:
        client = open_client(parse_store(embedded_dsn(Path(directory) / "store")))
        with_summing_views(client)
        migrate(client, database=TODAY)
        text = "\n".join(measure(client, rows, arguments.rounds))
        client.close()
    print(text)
    if arguments.write:
        write_section("roll-ups", "Roll-ups by minute", f"`python benchmarks/roll_ups.py`\n\n{text}")


if __name__ == "__main__":
    main()
