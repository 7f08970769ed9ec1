"""Ingest end to end: OTLP bytes in, durable, joined, judged, stored by a real collector process.

Phase rows per second from the first byte sent to the last row stored, beside the raw insert rate of the very
same rows, columns ready, into a fresh store of the same engine, in the same run: through the client, and from
memory as the collector does it with its embedded store, two batches at once. The sender runs on the same
machine and costs its share. Latency is the collector's own histogram, so quantiles are upper bounds of
buckets.

    python benchmarks/ingest.py [--steps 200] [--ranks 64] [--latency-steps 20] [--write]
    python benchmarks/ingest.py --quick     # a few rows through every path; the figures mean nothing
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import clickhouse_connect
from collector_under_load import LAYERS, body, collector, numbered, plain_span_body, post_all, rank_steps
from results import write_section

from moetrace_collectors.migrate import migrate
from moetrace_collectors.model import RankStep
from moetrace_collectors.pipeline import EMBEDDED_WRITERS
from moetrace_collectors.sinks.clickhouse import INSERT_SETTINGS
from moetrace_collectors.sinks.clickhouse_rows import TableColumns, TableRows, rank_step_rows
from moetrace_collectors.sinks.embedded_insert import EMBEDDED_SETTINGS, EmbeddedInsert

RANKS_PER_REQUEST = 8
"""As much as an OpenTelemetry Collector in front puts together; a rank alone sends up to 32 steps."""
BATCH_STEPS = 20
"""Steps per raw insert: about what the collector's own batches hold."""
LATENCY_RANKS = 256
QUICK_RANKS = 4
STORE_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How rank steps are sent."""

    name: str
    with_counts: bool = False
    compressed: bool = False
    as_spans: bool = False
    """Phase rows as child spans instead of packed."""
    options: tuple[str, ...] = ()
    """Of the collector."""

    @property
    def is_heavy(self) -> bool:
        """Whether a tenth of the steps is enough."""
        return self.with_counts or self.as_spans

    def bodies(self, steps: tuple[RankStep, ...], num_steps: int) -> list[bytes]:
        """Requests, `RANKS_PER_REQUEST` rank steps each."""
        groups = (
            numbered(steps[first : first + RANKS_PER_REQUEST], step)
            for step in range(num_steps)
            for first in range(0, len(steps), RANKS_PER_REQUEST)
        )
        if self.as_spans:
            return [plain_span_body(group) for group in groups]
        return [body(group, compressed=self.compressed) for group in groups]


LOADS = (
    Load(name="packed phases, plain"),
    Load(name="packed phases, gzip", compressed=True),
    Load(name="packed phases, plain, `--wal off`", options=("--wal", "off")),
    Load(name="phases as `moe.phase` spans, plain", as_spans=True),
    Load(name="with counts of 256 experts, gzip", with_counts=True, compressed=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """One measured load."""

    phase_rows: int
    all_rows: int
    wire_bytes: int
    acknowledged_s: float
    stored_s: float
    cpu_s: float
    peak_mib: float

    @property
    def rate(self) -> float:
        """Phase rows per second, end to end."""
        return self.phase_rows / self.stored_s


def throughput(directory: Path, load: Load, steps: tuple[RankStep, ...], num_steps: int) -> Throughput:
    bodies = load.bodies(steps, num_steps)
    rows = sum(len(one.phases) for one in steps) * num_steps
    with collector(directory, *load.options) as running:
        cpu = running.cpu_s()
        start = time.perf_counter()
        acknowledged = post_all(running.port, bodies, compressed=load.compressed)
        while running.stored_phase_rows() < rows:
            if time.perf_counter() - start > STORE_DEADLINE_S:
                raise SystemExit(f"{load.name}: {running.stored_phase_rows()} of {rows} rows were stored")
            time.sleep(0.1)
        stored = time.perf_counter() - start
        values = running.metrics()
        return Throughput(
            phase_rows=rows,
            all_rows=int(
                sum(v for (n, _), v in values.items() if n == "moetrace_collector_stored_rows_total")
            ),
            wire_bytes=sum(map(len, bodies)),
            acknowledged_s=acknowledged,
            stored_s=stored,
            cpu_s=running.cpu_s() - cpu,
            peak_mib=running.memory_kib("VmHWM") / 1024,
        )


def raw_insert(directory: Path, steps: tuple[RankStep, ...], num_steps: int, *, from_memory: bool) -> float:
    """Seconds to insert the same rows, columns ready, into a fresh store of this process."""
    path = directory.resolve() / "store"
    client = clickhouse_connect.get_client(dsn=f"chdb://{path}")
    migrate(client, database="moetrace")
    num_writers = EMBEDDED_WRITERS if from_memory else 1
    lanes: SimpleQueue[EmbeddedInsert] = SimpleQueue()
    for _ in range(num_writers):
        lanes.put(EmbeddedInsert(path, database="moetrace", settings=EMBEDDED_SETTINGS))

    def insert(tables: list[TableColumns | TableRows]) -> None:
        lane = lanes.get()
        try:
            insert_into(lane, tables)
        finally:
            lanes.put(lane)

    def insert_into(lane: EmbeddedInsert, tables: list[TableColumns | TableRows]) -> None:
        for table in tables:
            if isinstance(table, TableColumns) and from_memory:
                lane(table.table, table.arrow)
            elif isinstance(table, TableColumns):
                client.insert_arrow(table.table, table.arrow, database="moetrace", settings=INSERT_SETTINGS)
            else:
                client.insert(
                    table.table, list(table.columns), column_names=list(table.names), database="moetrace",
                    column_oriented=True, settings=INSERT_SETTINGS,
                )  # fmt: skip

    batches = []
    for first in range(0, num_steps, BATCH_STEPS):
        numbers = range(first, min(first + BATCH_STEPS, num_steps))
        rank_steps = [one for step in numbers for one in numbered(steps, step)]
        tables = rank_step_rows(rank_steps, late=False, received_unix_ms=0)
        batches.append([table for table in tables if len(table)])
    with ThreadPoolExecutor(num_writers) as writers:
        # Without a break, so that merges of what is stored cost their share, as they do the collector.
        start = time.perf_counter()
        list(writers.map(insert, batches))
        took = time.perf_counter() - start
    while not lanes.empty():
        lanes.get().close()
    client.close()
    return took


def latency(directory: Path, num_ranks: int, num_steps: int) -> dict[float, float]:
    """Upper bounds of the quantiles of verdict latency, one step of all ranks a second (10/s, 1 in 10)."""
    # Without counts: 8 million expert rows a second would measure the disk.
    steps = rank_steps(num_ranks=num_ranks, with_counts=False)
    with collector(directory) as running:
        begin = time.perf_counter()
        for step in range(num_steps):
            bodies = [body([one], compressed=True) for one in numbered(steps, step)]
            time.sleep(max(0.0, begin + step - time.perf_counter()))
            post_all(running.port, bodies, compressed=True, threads=8)
        name = "moetrace_collector_verdict_latency_seconds_bucket"
        deadline = time.monotonic() + 60
        while True:
            buckets = sorted(
                (float(labels.removeprefix('le="').rstrip('"')), value)
                for (metric, labels), value in running.metrics().items()
                if metric == name
            )
            if (buckets and buckets[-1][1] >= num_steps) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    total = buckets[-1][1]
    return {q: next(bound for bound, below in buckets if below >= q * total) for q in (0.5, 0.99)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ingest end to end.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--latency-steps", type=int, default=20)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="two steps of a few ranks: does it run at all")
    what.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    arguments = parser.parse_args()
    if arguments.latency_steps < 1:
        parser.error("--latency-steps: 1 or more expected")
    latency_ranks = LATENCY_RANKS
    if arguments.quick:
        arguments.steps, arguments.ranks, arguments.latency_steps = 2, QUICK_RANKS, 2
        latency_ranks = QUICK_RANKS
    os.environ["TZ"] = "UTC"
    time.tzset()
    lines = [
        "| load | phase rows/s end to end | raw insert rows/s: client | ratio | raw: from memory | ratio | "
        "acknowledged rows/s | CPU us per phase row | bytes on the wire per phase row | memory peak MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print(*lines, sep="\n", flush=True)
    for load in LOADS:
        steps = rank_steps(num_ranks=arguments.ranks, with_counts=load.with_counts)
        num_steps = max(1, arguments.steps // 10) if load.is_heavy else arguments.steps
        with tempfile.TemporaryDirectory() as name:
            done = throughput(Path(name), load, steps, num_steps)
        raws = []
        for from_memory in (False, True):
            with tempfile.TemporaryDirectory() as name:
                took = raw_insert(Path(name), steps, num_steps, from_memory=from_memory)
            raws.append(done.phase_rows / took)
        beside = " | ".join(f"{raw:,.0f} | {done.rate / raw:.2f}" for raw in raws)
        lines.append(
            f"| {load.name} | {done.rate:,.0f} | {beside} | "
            f"{done.phase_rows / done.acknowledged_s:,.0f} | {1e6 * done.cpu_s / done.phase_rows:.2f} | "
            f"{done.wire_bytes / done.phase_rows:.1f} | {done.peak_mib:.0f} |"
        )
        print(lines[-1], flush=True)
    with tempfile.TemporaryDirectory() as name:
        quantiles = latency(Path(name), latency_ranks, arguments.latency_steps)
    arguments_text = (
        f"--steps {arguments.steps} --ranks {arguments.ranks} --latency-steps {arguments.latency_steps}"
    )
    text = (
        f"{arguments.steps} steps of {arguments.ranks} ranks x {LAYERS} layers (a tenth of it with counts or "
        f"as spans), {RANKS_PER_REQUEST} rank steps a request, sender on the same machine; raw: the same "
        "rows with their columns ready, inserted into a fresh store. With counts, each phase row brings some "
        "50 rows of expert counts and traffic along.\n\n"
        + "\n".join(lines)
        + f"\n\nFrom the last rank to the verdict, {latency_ranks} ranks x {LAYERS} layers, one step a "
        f"second, a request per rank, phases only: half within {quantiles[0.5] * 1e3:g} ms, 99 % within "
        f"{quantiles[0.99] * 1e3:g} ms (bucket bounds).\n"
        f"`python benchmarks/ingest.py {arguments_text} --write`."
    )
    print(text[text.index("From the last rank") :])
    if arguments.write:
        write_section("ingest", "Ingest end to end", text)


if __name__ == "__main__":
    main()
