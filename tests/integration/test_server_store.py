"""A store behind its HTTP interface instead of inside the process: one DSN makes the difference.

No ClickHouse server is needed: `clickhouse_server` puts the interface before the embedded engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.collector_process import ROOT, CollectorProcess, collector, environment, moetrace
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas.clickhouse.render import migrations

RUN = SyntheticRun(run_id="moved", world_size=4, num_layers=2, slow_rank=2)
NUM_STEPS = 20
DIGESTS = (
    "SELECT (SELECT (count(), sum(cityHash64(*))) FROM phase_spans FINAL) AS phase_spans, "
    "(SELECT (count(), sum(cityHash64(*))) FROM expert_loads FINAL) AS expert_loads, "
    "(SELECT (count(), sum(cityHash64(*))) FROM rank_traffic FINAL) AS rank_traffic, "
    "(SELECT (count(), sum(cityHash64(*))) FROM step_barriers FINAL) AS step_barriers, "
    "(SELECT (count(), sum(cityHash64(toString(tuple(* EXCEPT phase_ns))))) FROM step_verdicts FINAL) "
    "AS step_verdicts, "
    "(SELECT (count(), sum(cityHash64(* EXCEPT received_at))) FROM rank_steps FINAL) AS rank_steps"
)
"""Every value that does not tell the time at which a collector wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running stand-in for a ClickHouse server."""

    process: subprocess.Popen[str]
    port: int

    @property
    def dsn(self) -> str:
        """Its address."""
        return f"clickhouse://127.0.0.1:{self.port}"

    def rows(self, sql: str) -> list[dict[str, object]]:
        """Rows of a query, by the command that people use."""
        done = moetrace("query", "--dsn", self.dsn, "--format", "JSONEachRow", sql)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def kill(self) -> None:
        """As a power cut ends it."""
        self.process.kill()
        self.process.wait()


@contextmanager
def server(store: Path, port: int = 0) -> Iterator[Server]:
    """A server on a store, killed in the end."""
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), env["PYTHONPATH"]])
    process = subprocess.Popen(
        [sys.executable, "-m", "clickhouse_server", str(store), str(port)],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Server(process=process, port=int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def send_all(process: CollectorProcess) -> None:
    """Every rank of every step, one request each."""
    for step in range(NUM_STEPS):
        for rank_step in RUN.step(step):
            assert process.send(request([rank_step])).status == 200


def test_a_server_is_migrated_once_and_read_by_its_address(tmp_path: Path) -> None:
    """`migrate --dsn`, `--ttl` and `query --dsn` do to a server what they do to an embedded store."""
    with server(tmp_path / "store") as running:
        first = moetrace("migrate", "--dsn", running.dsn, "--ttl", "phase_spans=7")
        assert (first.returncode, first.stdout.count("applied ")) == (0, len(migrations())), first.stderr
        second = moetrace("migrate", "--dsn", running.dsn)
        assert second.stdout == f"{running.dsn}: database moetrace is current\n"
        [table] = running.rows("SELECT engine_full FROM system.tables WHERE name = 'phase_spans'")
        assert "toIntervalDay(7)" in str(table["engine_full"])
        refused = moetrace("query", "--dsn", running.dsn, "SELECT nothing FROM phase_spans")
        assert refused.returncode == 1
        assert "nothing" in refused.stderr


def test_another_dsn_gives_the_same_rows(tmp_path: Path) -> None:
    """One load to a collector with its own store, and to one with a server: no table differs in a value."""
    with collector(tmp_path / "own") as process:
        send_all(process)
        assert process.terminate() == 0
    own = moetrace("query", "--dir", str(tmp_path / "own"), "--format", "JSONEachRow", DIGESTS)
    assert own.returncode == 0, own.stderr
    with server(tmp_path / "server") as running:
        with collector(tmp_path / "run", "--dsn", running.dsn) as process:
            send_all(process)
            assert process.terminate() == 0
        assert not (tmp_path / "run" / "store").exists()
        assert running.rows(DIGESTS) == [json.loads(own.stdout)]
        named = running.rows("SELECT DISTINCT rank FROM step_verdicts FINAL WHERE step >= 8")
        assert named == [{"rank": 2}]


def test_stateless_collectors_share_a_server_and_one_process_joins(tmp_path: Path) -> None:
    """Ranks go by turns to two collectors that only write; `moetrace join` finds every step whole."""
    with server(tmp_path / "store") as running:
        options = ("--join", "store", "--dsn", running.dsn)
        with collector(tmp_path / "a", *options) as one, collector(tmp_path / "b", *options) as other:
            for step in range(NUM_STEPS):
                for rank_step in RUN.step(step):
                    to = (one, other)[(step + rank_step.rank) % 2]
                    assert to.send(request([rank_step])).status == 200
            assert (one.terminate(), other.terminate()) == (0, 0)
        done = moetrace("join", "--dsn", running.dsn, "--once")
        assert (done.returncode, done.stdout) == (0, f"judged {NUM_STEPS} steps\n"), done.stderr
        found = running.rows(
            "SELECT DISTINCT rank, phase, closed_by FROM step_verdicts FINAL WHERE step >= 8"
        )
        assert found == [{"rank": 2, "phase": "expert_gemm", "closed_by": "complete"}]


@pytest.mark.parametrize("joins", [True, False])
def test_a_server_that_is_killed_costs_nothing_that_was_acknowledged(tmp_path: Path, joins: bool) -> None:
    """Kill -9 under load, away while ranks go on sending, back again: every row is there, none is lost.

    Whether the collector joins, or only writes.
    """
    acknowledged: set[tuple[int, int]] = set()
    progress = threading.Condition()
    stop = threading.Event()

    def send(process: CollectorProcess, rank: int) -> None:
        step = 0
        while not stop.is_set():
            if process.send(request([RUN.step(step)[rank]])).status == 200:
                with progress:
                    acknowledged.add((step, rank))
                    progress.notify_all()
                step += 1

    def wait_for(number: int) -> None:
        with progress:
            assert progress.wait_for(lambda: len(acknowledged) >= number, 60)

    with server(tmp_path / "store") as first:
        options = ("--dsn", first.dsn, *(() if joins else ("--join", "store")))
        with collector(tmp_path / "run", *options) as process:
            senders = [threading.Thread(target=send, args=(process, rank)) for rank in range(4)]
            for sender in senders:
                sender.start()
            try:
                wait_for(200)
                first.kill()
                process.wait_for("moetrace_collector_sink_errors_total", 1)
                wait_for(len(acknowledged) + 200)
                with server(tmp_path / "store", first.port) as again:
                    wait_for(len(acknowledged) + 50)
                    stop.set()
                    for sender in senders:
                        sender.join(60)
                    assert process.metric("moetrace_collector_sink_errors_total") >= 1
                    assert process.metric("moetrace_collector_lost_rows_total") == 0
                    assert process.metric("moetrace_collector_received_total") == len(acknowledged)
                    assert process.terminate() == 0
                    stored = again.rows("SELECT step, rank FROM rank_steps FINAL")
                    assert {(row["step"], row["rank"]) for row in stored} == acknowledged
                    if joins:
                        verdicts = again.rows("SELECT step FROM step_verdicts FINAL")
                        assert {row["step"] for row in verdicts} == {step for step, _ in acknowledged}
            finally:
                stop.set()
                for sender in senders:
                    sender.join(60)
