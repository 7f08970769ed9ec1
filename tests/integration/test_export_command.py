"""`moetrace export` from a real store: what ranks sent comes out as a trace and as spans."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from integration.collector_process import CollectorProcess, collector, moetrace, rows
from moetrace_collectors.decode import decode
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas.columns import PHASES
from trace_event_reader import read_trace
from unit.collectors.test_otlp_spans import receiver

RUN = SyntheticRun(run_id="exported", slow_rank=2, slow_layer=1, slow_ns=3_000_000)
STEPS = 30
PATIENCE_S = 60.0
TRACE_PROCESSOR = os.environ.get("MOETRACE_TEST_TRACE_PROCESSOR", "")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """A collector with a run of 30 steps in its store."""
    with collector(tmp_path_factory.mktemp("export") / "run") as running:
        for step in range(STEPS):
            running.send(request(RUN.step(step)))
        deadline = time.monotonic() + PATIENCE_S
        sql = b"SELECT count() AS n FROM moetrace.step_verdicts FINAL FORMAT JSONEachRow"
        while time.monotonic() < deadline:
            answer = running.post(sql, path="/", content_type="text/plain")
            if answer.status == 200 and int(json.loads(answer.body)["n"]) == STEPS:
                break
            time.sleep(0.1)
        yield running


def test_perfetto_from_a_running_collector(process: CollectorProcess, tmp_path: Path) -> None:
    """Chosen steps of all ranks, arrows from the slow rank, load counters; compressed by its name."""
    out = tmp_path / "trace.json.gz"
    done = moetrace("export", "--url", process.http_address, "--steps", "5,7-9", "--perfetto", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("run exported: 4 steps, 4 ranks; clocks of 3 ranks aligned")
    assert "open it at https://ui.perfetto.dev" in done.stdout
    trace = read_trace(out)
    assert {one["name"] for one in trace.slices if one["cat"] == "step"} == {
        "step 5", "step 7", "step 8", "step 9",
    }  # fmt: skip
    slow = [one for one in trace.arrows if one.target["name"] == "combine: transfer"]
    assert {one.source["pid"] for one in slow if one.source["args"]["layer"] == 1} == {2}
    received = sum(int(counts.counts.sum()) for counts in RUN.step(5)[1].experts if counts.kind == 4)
    assert [c["args"]["value"] for c in trace.counters if c["pid"] == 1] == [received] * 4
    assert "rank" in next(one["args"] for one in trace.slices if one["name"] == "step 9")


def test_otlp_carries_the_rows_that_ranks_sent(process: CollectorProcess) -> None:
    """Sent by ranks, stored, exported as plain spans, decoded: the same phase rows."""
    with receiver() as backend:
        done = moetrace("export", "--dir", str(process.directory), "--steps", "11", "--otlp", backend.url)
        assert done.returncode == 0, done.stderr
    assert f"in 1 trace sent to {backend.url}/v1/traces" in done.stdout
    decoded = [one for message in backend.requests for one in decode(message, max_world_size=64).rank_steps]
    assert [one.rank for one in decoded] == [0, 1, 2, 3]
    for one, given in zip(decoded, RUN.step(11), strict=True):
        assert one.duration_ns == given.duration_ns
        for column in PHASES.columns:
            sent, came = getattr(given.phases, column.name), getattr(one.phases, column.name)
            assert np.array_equal(sent, came), column.name


def test_another_collector_comes_to_the_same_verdicts(process: CollectorProcess, tmp_path: Path) -> None:
    """A run that is exported as plain spans into a second collector is joined and judged alike."""
    with collector(tmp_path / "second") as second:
        address = second.http_address
        done = moetrace("export", "--url", process.http_address, "--steps", "all", "--otlp", address)
        assert done.returncode == 0, done.stderr
        second.wait_for("moetrace_collector_joined_total", STEPS * RUN.world_size)
        assert second.terminate() == 0
    sql = (
        "SELECT step, evidence, rank, layer, phase, cause, worth_ns, step_ns, extension_ns "
        "FROM step_verdicts FINAL ORDER BY step"
    )
    assert rows(tmp_path / "second", sql) == rows(process.directory, sql)


def test_slow_steps_are_the_costliest(process: CollectorProcess, tmp_path: Path) -> None:
    """Without --steps the ten steps of largest worth with clear evidence are exported."""
    out = tmp_path / "trace.json"
    done = moetrace("export", "--dir", str(process.directory), "--run", "exported", "--perfetto", str(out))
    assert done.returncode == 0, done.stderr
    drawn = {one["name"] for one in read_trace(out).slices if one["cat"] == "step"}
    costliest = rows(
        process.directory,
        "SELECT step FROM step_verdicts FINAL WHERE evidence = 'clear' ORDER BY worth_ns DESC, step_ns DESC, "
        "step LIMIT 10",
    )
    assert drawn == {f"step {row['step']}" for row in costliest}


def test_a_backend_that_is_away_is_one_line_and_exit_code_1(process: CollectorProcess) -> None:
    """It names the address, and says that trying again is harmless."""
    done = moetrace("export", "--dir", str(process.directory), "--steps", "3", "--otlp", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "http://127.0.0.1:1/v1/traces does not take spans (0 taken before)" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nowhere to export to: give --perfetto FILE, --otlp URL, or both"),
        (["--otlp", "h:4318"], "--otlp h:4318: an address as in http://localhost:4318 expected"),
        (["--perfetto", "/nowhere/x.json"], "/nowhere is no directory to write in"),
        (["--steps", "x", "--perfetto", "x"], "slow, slow:20, all, or numbers and ranges"),
        (["--steps", "999", "--perfetto", "OUT"], "step 999 is not among the joined steps of run 'exported'"),
        (["--steps", "500-900", "--perfetto", "OUT"], "has no joined step of those asked for: check --steps"),
        (["--run", "nope", "--perfetto", "OUT"], "holds no run 'nope'"),
    ],
)
def test_wrong_usage_is_told_with_exit_code_2(
    process: CollectorProcess, tmp_path: Path, arguments: list[str], message: str
) -> None:
    """What is wrong and the fix; no file is left."""
    words = [str(tmp_path / "out.json") if word == "OUT" else word for word in arguments]
    done = moetrace("export", "--dir", str(process.directory), *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    not TRACE_PROCESSOR, reason="MOETRACE_TEST_TRACE_PROCESSOR names no trace_processor_shell"
)
def test_perfettos_own_trace_processor_reads_the_trace(process: CollectorProcess, tmp_path: Path) -> None:
    """Every slice and arrow is there and no event is dropped (`pip install perfetto`, and its binary)."""
    api = pytest.importorskip("perfetto.trace_processor")
    out = tmp_path / "trace.json.gz"
    done = moetrace("export", "--url", process.http_address, "--steps", "5-9", "--perfetto", str(out))
    assert done.returncode == 0, done.stderr
    read = read_trace(out)
    config = api.TraceProcessorConfig(bin_path=TRACE_PROCESSOR)
    with api.TraceProcessor(trace=str(out), config=config) as processor:

        def count(sql: str) -> int:
            return int(next(iter(processor.query(f"SELECT COUNT(*) AS n FROM {sql}"))).n)

        assert count("slice") == len(read.slices)
        assert count("flow") == len(read.arrows)
        assert count("stats WHERE severity IN ('error', 'data_loss') AND value > 0") == 0
