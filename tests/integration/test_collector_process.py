"""The collector end to end: ranks send, things go wrong, and every rank step is accounted for."""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from integration.collector_process import CollectorProcess, collector, moetrace, rows
from moetrace_collectors.testing import SyntheticRun, any_value, request, span
from moetrace_schemas import attributes
from moetrace_schemas.clickhouse.render import migrations
from moetrace_schemas.enums import Phase

RUN = SyntheticRun(
    run_id="e2e", world_size=4, num_layers=2, slow_rank=2, slow_layer=1, slow_phase=Phase.EXPERT_GEMM
)
NUM_STEPS = 20
DEAD_FROM = 15
"""Rank 3 dies before it sends this step."""


def test_every_rank_step_is_accounted_for(tmp_path: Path) -> None:
    """One rank sends twice, one dies mid-run, one sends garbage: the counts add up, and the rows are stored.

    The slow rank is named in its layer and phase in every complete step.
    """
    directory = tmp_path / "run"
    with collector(directory, "--join-timeout-s", "0.5") as process:
        for step in range(NUM_STEPS):
            for rank_step in RUN.step(step):
                if rank_step.rank == 3 and step >= DEAD_FROM:
                    continue
                assert process.send(request([rank_step])).status == 200
                if rank_step.rank == 0:
                    assert process.send(request([rank_step])).status == 200
        garbage = request(RUN.step(0)[:1])
        garbage.resource_spans[0].scope_spans[0].spans[0].attributes.add(
            key=attributes.CLOCK, value=any_value("sundial")
        )
        answer = process.send(garbage)
        assert (answer.status, b"sundial" in answer.body) == (200, True)
        assert process.post(b"\xff\xff garbage").status == 400
        process.wait_for("moetrace_collector_steps_total", NUM_STEPS)

        late = replace(RUN.step(NUM_STEPS - 1)[3])
        assert process.send(request([late])).status == 200
        process.wait_for("moetrace_collector_late_total", 1)
        counts = {
            fate: process.metric(f"moetrace_collector_{fate}")
            for fate in (
                "received_total", "joined_total", "late_total", "duplicate_total", "rejected_total",
                "pending",
            )
        }  # fmt: skip
        num_sent = NUM_STEPS * 3 + DEAD_FROM
        assert counts == {
            "received_total": num_sent + NUM_STEPS + 3,
            "joined_total": num_sent,
            "late_total": 1,
            "duplicate_total": NUM_STEPS,
            "rejected_total": 2,
            "pending": 0,
        }
        assert process.metric("moetrace_collector_missing_ranks_total") == NUM_STEPS - DEAD_FROM
        note = json.loads((directory / "collector.json").read_text())
        assert note["run_ids"] == ["e2e"]
        assert process.terminate() == 0
    assert not (directory / "collector.json").exists()

    verdicts = rows(
        directory,
        "SELECT step, rank, layer, phase, closed_by, missing_ranks FROM step_verdicts FINAL ORDER BY step",
    )
    assert [verdict["closed_by"] for verdict in verdicts] == ["complete"] * 15 + ["timeout"] * 5
    assert [verdict["missing_ranks"] for verdict in verdicts] == [[]] * 15 + [[3]] * 5
    assert {(v["rank"], v["layer"], v["phase"]) for v in verdicts[:15]} == {(2, 1, "expert_gemm")}
    stored = rows(
        directory, "SELECT count() AS n, sum(late) AS late, uniq(step, rank) AS keys FROM rank_steps FINAL"
    )
    assert stored == [{"n": num_sent + 1, "late": 1, "keys": num_sent + 1}]
    spans = rows(directory, "SELECT count() AS n FROM phase_spans FINAL")
    assert spans == [{"n": (num_sent + 1) * len(RUN.step(0)[0].phases)}]
    events = rows(directory, "SELECT kind, count() AS n FROM collector_events GROUP BY kind ORDER BY kind")
    assert {str(event["kind"]): event["n"] for event in events} == {
        "duplicate": 20, "late": 1, "partial": 5, "rejected": 2, "started": 1, "stopped": 1,
    }  # fmt: skip
    letters = [json.loads(line) for line in (directory / "dead_letter.jsonl").read_text().splitlines()]
    assert [letter["reason"] for letter in letters] == ["invalid_attribute", "malformed_request"]


def test_what_was_acknowledged_survives_a_stop(tmp_path: Path) -> None:
    """SIGTERM right after the last answer: open steps are closed by shutdown and everything is stored."""
    with collector(tmp_path, "--join-timeout-s", "60") as process:
        for step in range(10):
            assert process.send(request(RUN.step(step)[:3])).status == 200
        assert process.terminate() == 0
    assert rows(tmp_path, "SELECT closed_by, count() AS n FROM step_verdicts GROUP BY closed_by") == [
        {"closed_by": "shutdown", "n": 10}
    ]
    assert rows(tmp_path, "SELECT count() AS n FROM rank_steps") == [{"n": 30}]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_under_load_loses_nothing_that_was_acknowledged(tmp_path: Path, number: int) -> None:
    """Senders go on while the signal comes: every rank step that got a 200 is in the store afterwards."""
    acknowledged: list[tuple[int, int]] = []

    def send_until_refused(process: CollectorProcess, rank: int) -> None:
        for step in range(10_000):
            try:
                if process.send(request([RUN.step(step)[rank]])).status != 200:
                    return
            except OSError:
                return
            acknowledged.append((step, rank))

    with collector(tmp_path) as process:
        senders = [threading.Thread(target=send_until_refused, args=(process, rank)) for rank in range(4)]
        for sender in senders:
            sender.start()
        process.wait_for("moetrace_collector_received_total", 100)
        process.process.send_signal(number)
        assert process.process.wait(60) == 0
        for sender in senders:
            sender.join()
    stored = rows(tmp_path, "SELECT step, rank FROM rank_steps FINAL")
    assert len(acknowledged) >= 100
    assert set(acknowledged) <= {(row["step"], row["rank"]) for row in stored}


def test_a_run_can_be_sent_again_without_doubling(tmp_path: Path) -> None:
    """A second collector on the same directory that receives the same steps leaves one row for each."""
    for _ in range(2):
        with collector(tmp_path) as process:
            process.send(request([step for number in range(3) for step in RUN.step(number)]))
            assert process.terminate() == 0
    assert rows(tmp_path, "SELECT count() AS n FROM rank_steps FINAL") == [{"n": 12}]
    assert rows(tmp_path, "SELECT count() AS n FROM step_verdicts FINAL") == [{"n": 3}]


def test_a_second_collector_is_told_who_owns_the_directory(tmp_path: Path) -> None:
    """One line with the owner's pid, address and how to query it; exit code 2."""
    with collector(tmp_path) as process:
        done = moetrace("collect", "--dir", str(tmp_path), "--http-port", "0", "--grpc-port", "0")
        assert done.returncode == 2
        assert done.stderr == (
            f"moetrace: {tmp_path} is owned by the collector with pid {process.process.pid} at "
            f"{process.http_address}: query it with moetrace query --dir {tmp_path} '...', "
            "stop it, or give this one another --dir\n"
        )


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_taken_port_is_named_with_the_fix(tmp_path: Path, transport: str) -> None:
    """A port that is in use is one line on stderr; exit code 2."""
    with collector(tmp_path / "one") as process:
        address = process.http_address if transport == "http" else process.grpc_address
        port = address.rpartition(":")[2]
        ports = {"http": "0", "grpc": "0", transport: port}
        done = moetrace(
            "collect", "--dir", str(tmp_path / "two"),
            "--http-port", ports["http"], "--grpc-port", ports["grpc"],
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.startswith(f"moetrace: cannot listen on 127.0.0.1:{port} for ")
        assert f"--{transport}-port" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_query_reads_through_the_owner_and_from_the_store(tmp_path: Path) -> None:
    """The same query gives the same answer while a collector lives and after it has stopped."""
    sql = "SELECT count() AS n FROM schema_migrations FINAL"
    with collector(tmp_path) as process:
        through_owner = rows(tmp_path, sql)
        assert process.terminate() == 0
    assert rows(tmp_path, sql) == through_owner == [{"n": len(migrations())}]
    failed = moetrace("query", "--dir", str(tmp_path), "SELECT nothing")
    assert failed.returncode == 1
    assert failed.stderr.startswith("moetrace: Code: 47. DB::Exception: Unknown expression identifier")
    assert len(failed.stderr.splitlines()) == 1
    refused = moetrace("query", "--dir", str(tmp_path), "DROP TABLE step_verdicts")
    assert (refused.returncode, "only reading" in refused.stderr) == (1, True)


def test_query_on_a_store_without_owner_reaches_nothing_outside_it(tmp_path: Path) -> None:
    """What the engine's readonly setting lets through is refused there as it is by a collector."""
    with collector(tmp_path / "run") as process:
        assert process.terminate() == 0
    for sql in (
        f"SELECT 1 INTO OUTFILE '{tmp_path / 'out'}'",
        "SELECT file('/etc/hostname')",
        "SELECT 1; SELECT 2",
    ):
        refused = moetrace("query", "--dir", str(tmp_path / "run"), sql)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1), sql
        assert not refused.stdout
    assert not (tmp_path / "out").exists()


def test_query_finds_the_newest_run(tmp_path: Path) -> None:
    """Without --dir the newest run under ./moetrace-runs is read; without any, the line says what to do."""
    done = moetrace("query", "SELECT 1", cwd=tmp_path)
    assert (done.returncode, done.stderr.startswith("moetrace: no run directory")) == (2, True)
    with collector(tmp_path / "moetrace-runs" / "one") as process:
        assert process.terminate() == 0
    done = moetrace("query", "SELECT 1 AS one", "--format", "CSVWithNames", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, '"one"\n1\n')


def test_a_span_of_each_rank_shares_one_trace(tmp_path: Path) -> None:
    """The trace id in the store is the one that every rank derived."""
    with collector(tmp_path) as process:
        process.send(request(RUN.step(7)))
        assert process.terminate() == 0
    expected = span(RUN.step(7)[0]).trace_id.hex()
    assert rows(tmp_path, "SELECT DISTINCT trace_id FROM rank_steps") == [{"trace_id": expected}]
