"""A rank with a spool and a real collector that is killed and comes back: every step ends in the store."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from integration.collector_process import collector, moetrace, rows
from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.emit.otlp import OtlpEmitter
from moetrace.emit.spool import open_spool
from moetrace.guard import Guard
from moetrace.self_metrics import SelfMetrics
from unit.moetrace.records import step_record

CONTEXT = RankContext(
    run_id="spooled", rank=0, world_size=1, ep_rank=0, ep_size=1, ep_group=0, host_name="node-1"
)


@dataclass
class Sender:
    """What the emitter asks the tracer for."""

    config: Config
    context: RankContext = CONTEXT
    guard: Guard = field(default_factory=Guard)
    model_name: str = "olmoe"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(metrics: SelfMetrics, *, exported: int = 0, spooled: int = 0) -> None:
    """Until so many steps are delivered or on disk; the test's own assertions say what is wrong if not."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if metrics.exported["otlp"] >= exported and metrics.spooled_steps >= spooled:
            return
        time.sleep(0.02)


def test_a_collector_that_is_killed_and_comes_back_has_every_step(tmp_path: Path) -> None:
    """Before, during and after the outage: sent, spooled, sent in order; no step lost on either side."""
    port = free_port()
    config = Config(
        endpoint=f"http://127.0.0.1:{port}", spool_dir=str(tmp_path / "spool"), export_timeout_s=5.0
    )
    sender, metrics = Sender(config), SelfMetrics()
    emitter = OtlpEmitter(lambda: sender, metrics, config, spool=open_spool(config, sender.context, metrics))

    def emit(first: int, last: int) -> None:
        now_ns = time.time_ns()
        for step in range(first, last):
            emitter.emit(step_record(step, start_unix_ns=now_ns + step, traffic=(), cohort=""))

    options = ("--http-port", str(port))
    with collector(tmp_path / "run", *options) as process:
        emit(0, 20)
        wait_until(metrics, exported=20)
        process.process.kill()
        process.process.wait()
    emit(20, 60)
    wait_until(metrics, spooled=40)
    assert metrics.spooled_steps == 40
    spooled = [path.name for path in (tmp_path / "spool").iterdir()]
    assert spooled == ["spooled-rank-00000-0000000001.jsonl"]
    read = moetrace("analyze", str(tmp_path / "spool"), "--json", cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    with collector(tmp_path / "run", *options) as process:
        wait_until(metrics, exported=60)
        emit(60, 70)
        assert emitter.close(time.monotonic() + 30) is True
        assert process.terminate() == 0
    assert not metrics.dropped
    assert metrics.exported == {"otlp": 70}
    assert os.listdir(tmp_path / "spool") == []
    stored = rows(tmp_path / "run", "SELECT step FROM rank_steps FINAL ORDER BY step")
    assert [row["step"] for row in stored] == list(range(70))
    verdicts = rows(tmp_path / "run", "SELECT count() AS n, any(closed_by) AS c FROM step_verdicts FINAL")
    assert verdicts == [{"n": 70, "c": "complete"}]
