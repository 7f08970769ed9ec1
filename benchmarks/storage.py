"""Bytes on disk per row of every table a collector fills, on simulated steps and on recorded gloo runs.

Rows go in as a collector writes them, parts are merged to the end, and the engine is asked for the compressed
size of the columns. Simulated work is log-normal to the nanosecond, which is the worst for a codec; the gloo
runs are real steps of two and four ranks (tests/data/gloo_runs), repeated as they are.

    python benchmarks/storage.py [--steps 200] [--write]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from results import write_section

from moetrace_collectors.migrate import migrate
from moetrace_collectors.model import JoinedStep
from moetrace_collectors.simulate import START_UNIX_NS, Clocks, Noise, SimulatedRun, simulate
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse import ClickHouseSink
from moetrace_collectors.store import embedded_dsn, open_client, parse_store
from moetrace_collectors.verdict import VerdictEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import gloo_replay

TABLES = ("phase_spans", "rank_steps", "expert_loads", "rank_traffic", "step_verdicts", "step_barriers")
ROLL_UPS = ("phase_minute_rows", "expert_load_minute_rows", "exchange_minute_rows")
NOISE = Noise(spread=0.05, hiccups_per_step=0.05, hiccup_ns=100_000.0)
CLOCKS = Clocks(offset_ns=1e6, drift_ppm=5.0, jitter_ns=1e4)


def simulated(steps: int, ranks: int, layers: int) -> Iterator[JoinedStep]:
    run = SimulatedRun(
        run_id=f"simulated-{ranks}x{layers}",
        num_ranks=ranks,
        num_layers=layers,
        num_experts=max(64, ranks),
        num_steps=steps,
        noise=NOISE,
        clocks=CLOCKS,
    )
    for step in simulate(run):
        yield step.joined


def recorded(steps: int) -> Iterator[JoinedStep]:
    for name in gloo_replay.cases():
        of_run = list(gloo_replay.joined_steps(name))
        for index in range(steps):
            again = of_run[index % len(of_run)]
            start_unix_ns = START_UNIX_NS + 10_000_000_000 * index
            yield replace(
                again,
                step=index,
                rank_steps=tuple(
                    replace(record, step=index, start_unix_ns=start_unix_ns) for record in again.rank_steps
                ),
            )


def measure(steps: Iterable[JoinedStep]) -> dict[str, tuple[int, float, float]]:
    """Table -> rows, compressed bytes of the columns per row, bytes of all files per row."""
    with tempfile.TemporaryDirectory() as directory:
        client = open_client(parse_store(embedded_dsn(Path(directory) / "store")))
        migrate(client, database="moetrace")
        sink = ClickHouseSink(
            client,
            database="moetrace",
            batch_bytes=1 << 60,
            on_stored=lambda table, rows: None,
            on_lost=lambda table, rows: None,
        )
        engine = VerdictEngine()
        for number, joined in enumerate(steps, start=1):
            sink.take_step(StepResult(joined=joined, verdict=engine.judge(joined), loads=()))
            if number % 50 == 0:
                sink.flush()
        sink.flush()
        sizes = {}
        for table in (*TABLES, *ROLL_UPS):
            client.command(f"OPTIMIZE TABLE moetrace.{table} FINAL")
            sizes[table] = size(client, table)
        client.close()
        return sizes


def size(client: Any, table: str) -> tuple[int, float, float]:
    rows, compressed, on_disk = client.query(
        "SELECT sum(rows), sum(data_compressed_bytes), sum(bytes_on_disk) FROM system.parts "
        f"WHERE active AND database = 'moetrace' AND table = '{table}'"
    ).result_rows[0]
    return int(rows), compressed / max(rows, 1), on_disk / max(rows, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes on disk per row.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    arguments = parser.parse_args()
    cases = {
        "simulated, 8 ranks x 8 layers": simulated(arguments.steps, 8, 8),
        "simulated, 64 ranks x 61 layers": simulated(max(arguments.steps // 50, 2), 64, 61),
        "recorded gloo runs": recorded(arguments.steps),
    }
    lines = [
        "| data | table | rows | compressed bytes a row | bytes on disk a row |",
        "|---|---|---|---|---|",
    ]
    for name, steps in cases.items():
        for table, (rows, compressed, on_disk) in measure(steps).items():
            if rows:
                lines.append(f"| {name} | `{table}` | {rows} | {compressed:.2f} | {on_disk:.2f} |")
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        write_section("storage", "Bytes on disk", f"`python benchmarks/storage.py`\n\n{text}")


if __name__ == "__main__":
    main()
