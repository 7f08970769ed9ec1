"""From announced placements to a verdict: a real collector, its store, and every placement command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from ledger_builders import EVEN, SWAPPED, placement_span, report
from moetrace_collectors.cli import main
from moetrace_collectors.model import ExpertCounts, RankStep
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_dashboards.queries.sql import PLACEMENT_EPOCHS
from moetrace_schemas.enums import COUNT_KIND_CODE, CountKind

from .collector_process import CollectorProcess, collector, moetrace

RUN = SyntheticRun(run_id="moved", world_size=4, num_layers=2, num_experts=8, jitter_ns=200_000)
SLOWER = replace(RUN, slow_rank=1, slow_ns=1_500_000)
CANARY = replace(RUN, run_id="canary", slow_rank=0, slow_ns=1_000_000)
CANARY_STEPS = 120
CHANGED_AT = 150
STEPS = 320
ROUTED = COUNT_KIND_CODE[CountKind.ROUTED]


def schema(name: str) -> dict[str, Any]:
    """A published schema."""
    text = resources.files("moetrace_schemas.json").joinpath(name).read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def ranks_of(step: int) -> list[RankStep]:
    """Version 1 first, then version 2, under which one rank is slower."""
    run, version = (RUN, 1) if step < CHANGED_AT else (SLOWER, 2)
    return [replace(rank, placement_version=version) for rank in run.step(step)]


def post(process: CollectorProcess, *found: Span) -> None:
    """Send spans."""
    message = ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=list(found))])]
    )
    assert process.post(message.SerializeToString()).status == 200


def query(process: CollectorProcess, sql: str) -> list[dict[str, Any]]:
    """Rows of a query."""
    answer = process.post(
        sql.encode(), path="/?default_format=JSONEachRow&output_format_json_quote_64bit_integers=0"
    )
    assert answer.status == 200, answer.body
    return [json.loads(line) for line in answer.body.splitlines()]


def wait_for(process: CollectorProcess, sql: str, wanted: int) -> None:
    """Until a count in the store is there."""
    deadline = time.monotonic() + 60
    while int(query(process, sql)[0]["n"]) < wanted:
        assert time.monotonic() < deadline, sql
        time.sleep(0.05)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """A collector that has seen two epochs of a run; the second is slower, and every rank announced it."""
    with collector(tmp_path_factory.mktemp("ledger") / "run") as process:
        post(process, placement_span(report(1, EVEN, run_id="moved")))
        for step in range(STEPS):
            if step == CHANGED_AT:
                told = report(2, SWAPPED, run_id="moved", step=step)
                sent = [replace(told, rank=rank) for rank in range(4)]
                for each in sent:
                    post(process, placement_span(each, PLACEMENT_EXPERT_BYTES=1000, PLACEMENT_PROPOSER="b"))
            assert process.post(request(ranks_of(step)).SerializeToString()).status == 200
        for step in range(CANARY_STEPS):
            assert process.post(request(CANARY.step(step)).SerializeToString()).status == 200
        wait_for(process, "SELECT count() AS n FROM step_verdicts FINAL", STEPS + CANARY_STEPS)
        wait_for(process, "SELECT count() AS n FROM placement_ledger WHERE event = 'judged'", 1)
        yield process


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and output of one command."""
    code = main(list(arguments))
    said = capsys.readouterr()
    assert code != 2, said.err
    return code, said.out


def document(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON document, valid against its schema."""
    code, out = command(capsys, *arguments, "--json")
    loaded: dict[str, Any] = json.loads(out)
    rules = schema(name)
    jsonschema.Draft202012Validator.check_schema(rules)
    jsonschema.Draft202012Validator(rules).validate(loaded)
    return code, loaded


def test_every_transition_is_in_the_ledger_once(
    running: CollectorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """Announced, applied, and judged by the collector itself as it ran: slower, so roll back to version 1."""
    code, found = document(
        capsys, "placement_ledger.schema.json", "placement", "list", "--url", running.http_address
    )
    rows = found["rows"]
    assert code == 0
    assert [(row["event"], row["version"], row["previous_version"]) for row in rows[:4]] == [
        ("announced", 1, None), ("applied", 1, None), ("announced", 2, 1), ("applied", 2, 1),
    ]  # fmt: skip
    assert [(row["event"], row["verdict"], row["rollback_version"]) for row in rows[4:]] == [
        ("judged", "regressed", 1)
    ]
    second = rows[2]
    assert (second["experts_copied"], second["copied_bytes"], second["step"]) == (2, 2000, CHANGED_AT)
    assert second["proposed_by"] == "b"
    assert rows[3]["step"] == CHANGED_AT


def test_the_mapping_of_each_epoch_is_in_the_store(running: CollectorProcess) -> None:
    """Slot by slot, for joins in SQL."""
    rows = query(
        running,
        "SELECT version, expert, ep_rank FROM placement_slots FINAL "
        "WHERE run_id = 'moved' AND layer = 0 AND slot = 0 ORDER BY version",
    )
    assert [(row["version"], row["expert"], row["ep_rank"]) for row in rows] == [(1, 0, 0), (2, 2, 0)]


def test_the_ledger_is_sound(running: CollectorProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0; the head that is printed is accepted as the noted one."""
    code, found = document(
        capsys, "placement_verify.schema.json", "placement", "verify", "--url", running.http_address
    )
    assert (code, found["ledgers"][0]["sound"], found["ledgers"][0]["run_id"]) == (0, True, "moved")
    head = found["ledgers"][0]["head"]
    arguments = ("placement", "verify", "--url", running.http_address, "--run", "moved", "--head")
    assert command(capsys, *arguments, head)[0] == 0
    code, out = command(capsys, *arguments, "0" * 64)
    assert code == 1
    assert "cut: no row has the expected hash" in out


def test_before_and_after_are_compared(running: CollectorProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and the rollback target; the other way round it is accepted."""
    arguments = ("placement", "compare", "--url", running.http_address, "--run", "moved")
    code, found = document(capsys, "placement_comparison.schema.json", *arguments)
    assert (code, found["verdict"], found["rollback_version"]) == (1, "regressed", 1)
    assert found["sentence"].startswith("regressed -> roll back to version 1; train: step_p95")
    (mode,) = found["modes"]
    assert (mode["steps_before"], mode["steps_after"]) == (CHANGED_AT, STEPS - CHANGED_AT - 5)
    figures = {figure["name"]: figure for figure in mode["figures"]}
    assert figures["step_p50"]["change"] == pytest.approx(1.5 / 2.9, rel=0.3)
    assert figures["throughput"]["change"] < -0.2
    assert figures["cross_node_share"]["after"] == 0.0
    code, found = document(
        capsys, "placement_comparison.schema.json", *arguments, "--before", "2", "--after", "1"
    )
    assert (code, found["verdict"]) == (0, "accepted")
    code, out = command(capsys, *arguments)
    assert code == 1
    assert "step_p95 ms" in out


def test_an_annotation_has_what_it_needs_from_the_ledger(running: CollectorProcess) -> None:
    """What a push of dashboards asks for: copies and replicas of the change, and the verdict's sentence."""
    found = {row["placement"]: row for row in query(running, PLACEMENT_EPOCHS) if row["run_id"] == "moved"}
    assert [int(row["is_announced"]) for row in found.values()] == [1, 1]
    assert (found[1]["experts_copied"], found[1]["sentence"]) == (None, "")
    second = found[2]
    assert (second["before"], second["experts_copied"], second["copied_bytes"]) == (1, 2, 2000)
    assert second["replicas_added"] == 0
    assert second["sentence"].startswith("regressed -> roll back to version 1")


def test_serving_records_are_assigned_to_epochs(
    running: CollectorProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By version or by time; failures that rise decide as step times do."""
    start = RUN.start_unix_ns / 1e9
    lines = ["time_unix_s,placement_version,ttft_ms,tpot_ms,failed"]
    for number in range(200):
        lines.append(f"{start + number * 0.007},,{100 + number % 7},5,0")
        lines.append(f",2,{100 + number % 7},5,{int(number % 5 == 0)}")
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(lines))
    _, found = document(
        capsys, "placement_comparison.schema.json", "placement", "compare", "--url", running.http_address,
        "--run", "moved", "--requests", str(path),
    )  # fmt: skip
    requests = next(mode for mode in found["modes"] if mode["name"] == "requests")
    assert (requests["verdict"], requests["steps_before"], requests["steps_after"]) == ("regressed", 200, 200)


def test_two_pools_are_compared_at_the_same_time(
    running: CollectorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """A canary of two ranks beside two others: they share every exchange, so neither is slower."""
    code, found = document(
        capsys, "placement_comparison.schema.json", "placement", "compare", "--url", running.http_address,
        "--run", "moved", "--pool", "2-3", "--against", "0,1", "--max-slowdown", "0.2",
    )  # fmt: skip
    assert (found["before"], found["after"]) == ("ranks 0,1", "ranks 2-3")
    assert (code, found["verdict"]) == (0, "accepted")


def test_two_runs_are_compared_at_the_same_time(
    running: CollectorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slower canary beside the run that serves, over the time that both ran."""
    code, found = document(
        capsys, "placement_comparison.schema.json", "placement", "compare", "--url", running.http_address,
        "--run", "moved", "--canary", "canary",
    )  # fmt: skip
    assert (code, found["verdict"], found["rollback_version"]) == (1, "regressed", None)
    assert found["sentence"].startswith("regressed -> roll back to run moved")
    (mode,) = found["modes"]
    assert (mode["steps_before"], mode["steps_after"]) == (CANARY_STEPS, CANARY_STEPS)


def test_a_proposal_is_recorded_through_the_running_collector(
    running: CollectorProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From a planner's file: the next version, not in force; a second time it is there already."""
    record = {
        "run_id": "moved",
        "ranks": 4,
        "physical_to_logical": [list(row) for row in SWAPPED],
        "proposed_by": "planner",
        "policy_version": "p7",
        "telemetry_window": [0, 149],
        "expert_bytes": 1000,
        "memory_bytes": 3000,
        "weight_digests": {"all": "ab" * 32},
    }
    jsonschema.Draft202012Validator(schema("placement_record.schema.json")).validate(record)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    code, out = command(capsys, "placement", "record", str(path), "--url", running.http_address, "--json")
    row = json.loads(out)
    assert (code, row["event"], row["version"], row["memory"]) == (0, "proposed", 3, "does_not_fit")
    assert row["document"]["terms"]["telemetry_window"] == [0, 149]
    arguments = ("placement", "record", str(path), "--url", running.http_address, "--version", "3")
    assert "it was there already" in command(capsys, *arguments)[1]
    record["physical_to_logical"] = [list(row) for row in EVEN]
    path.write_text(json.dumps(record))
    assert main(list(arguments)) == 1
    assert "this version has another mapping in the ledger" in capsys.readouterr().err
    code, found = document(
        capsys, "placement_ledger.schema.json", "placement", "list", "--url", running.http_address
    )
    assert found["rows"][-1]["event"] == "proposed"
    assert command(capsys, "placement", "verify", "--url", running.http_address)[0] == 0


def test_a_replay_is_recorded_and_scored_in_the_shadow(
    running: CollectorProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From the traffic of the run to a plan, its score on live traffic, and its row in the ledger."""
    code, out = command(
        capsys, "replay", "--run", "moved", "--url", running.http_address, "--slots", "12", "--ranks", "4",
        "--expert-mb", "1", "--json",
    )  # fmt: skip
    assert code == 0
    path = tmp_path / "replay.json"
    path.write_text(out)
    code, found = document(
        capsys, "placement_shadow.schema.json", "placement", "shadow", "--run", "moved", "--url",
        running.http_address, "--propose", str(path), "--planner", "eplb", "--last", "50",
    )  # fmt: skip
    assert (code, found["steps"]) == (0, 50)
    # What ran is what was announced, not experts in order.
    assert any("today's placement is version 2 of the ledger" in told for told in found["assumptions"])
    assert sum(found["today"]["rank_loads"][0]) == pytest.approx(sum(found["proposed"]["rank_loads"][0]))
    code, out = command(
        capsys, "placement", "record", str(path), "--planner", "eplb", "--url", running.http_address,
        "--json",
    )  # fmt: skip
    row = json.loads(out)
    assert (code, row["run_id"], row["policy_version"]) == (0, "moved", "moetrace-replay/eplb")
    assert row["copied_bytes"] == row["experts_copied"] * 1_000_000
    assert row["replicas_added"] == 8


def test_loads_of_two_epochs_are_never_summed(
    running: CollectorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest epoch is read and says so in one line; --epoch reads another, under its own mapping."""
    arguments = ("load", "--run", "moved", "--url", running.http_address)
    _, newest = document(capsys, "load_result.schema.json", *arguments)
    assert (newest["placement_version"], newest["steps"]) == (2, STEPS - CHANGED_AT)
    (line,) = [told for told in newest["warnings"] if "figures are of version" in told]
    assert line == (
        "the run had placement versions 1, 2: figures are of version 2 alone, the newest with counts "
        "(--epoch for another)"
    )
    _, first = document(capsys, "load_result.schema.json", *arguments, "--epoch", "1")
    assert first["placement_version"] == 1
    assert 0 < first["steps"] <= CHANGED_AT
    assert any("where version 1 of the ledger has them" in told for told in first["warnings"])
    _, replayed = document(
        capsys, "replay_result.schema.json", "replay", "--run", "moved", "--url", running.http_address
    )
    assert replayed["placement_version"] == 2
    assert replayed["costs"]["expert_bytes"] == 1000
    assert (
        "today's placement is version 2 of the ledger (else tell it with --placement)"
        in (replayed["assumptions"])
    )
    assert any("as the ledger says" in told for told in replayed["assumptions"])
    assert main([*arguments, "--epoch", "7"]) == 2
    assert "--epoch 7: run moved has no step under it: versions are 1, 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "--run", "nobody"), "holds no placement ledger of run 'nobody'"),
        (("show", "--version", "99"), "holds no version 99"),
        (("compare", "--after", "9"), "has no step under version 9: versions are 1, 2"),
        (("compare", "--pool", "0-9", "--against", "1"), "has ranks 0 to 3"),
        (("compare", "--pool", "x", "--against", "1"), "ranks as in 0-3,6"),
        (("compare", "--pool", "0-1", "--against", "1-2"), "share rank 1"),
        (("compare", "--pool", "0"), "belong together"),
        (("compare", "--before", "1", "--canary", "x"), "one of them"),
        (("record", "/nowhere.json"), "/nowhere.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    running: CollectorProcess,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    """What is wrong, and the fix."""
    assert main(["placement", *arguments, "--url", running.http_address]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_metrics_tell_what_happened(running: CollectorProcess) -> None:
    """Copies, replicas, rollback target, judged changes, and that repeats were seen as such."""
    assert running.metric("moetrace_placement_experts_copied_total") == 2
    assert running.metric("moetrace_placement_copied_bytes_total") == 2000
    assert running.metric("moetrace_placement_rollback_version") == 1
    assert running.metric("moetrace_placement_verdicts_total") == 1


def test_a_verdict_is_written_into_the_ledger(
    running: CollectorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the running collector as a row of event judged; the same comparison again adds none."""
    arguments = ("placement", "compare", "--url", running.http_address, "--run", "moved", "--record")
    before = len(query(running, "SELECT sequence FROM placement_ledger WHERE run_id = 'moved'"))
    for _ in range(2):
        assert main([*arguments, "--json"]) == 1
        said = capsys.readouterr()
        assert f"row {before} of the ledger of run moved: regressed" in said.err
    _, listed = document(
        capsys, "placement_ledger.schema.json", "placement", "list", "--url", running.http_address
    )
    assert len(listed["rows"]) == before + 1
    row = listed["rows"][-1]
    assert (row["event"], row["version"], row["verdict"], row["rollback_version"]) == (
        "judged", 2, "regressed", 1,
    )  # fmt: skip
    assert row["document"] == json.loads(said.out)
    assert command(capsys, "placement", "verify", "--url", running.http_address)[0] == 0
    assert main([*arguments, "--pool", "0", "--against", "1"]) == 2
    assert "a verdict belongs to a placement version" in capsys.readouterr().err


def test_counts_of_slots_are_stored_as_counts_of_experts(tmp_path: Path) -> None:
    """Physical counts of two epochs meet in the store under logical experts, also after a restart."""
    slots = np.array([5, 1, 1, 1, 1, 1, 1, 1, 7, 0, 0, 0])
    first = (0, 1, 2, 3, 4, 5, 6, 7, 0, -1, -1, -1)
    second = (7, 6, 5, 4, 3, 2, 1, 0, 7, -1, -1, -1)

    def counted(step: int, version: int) -> bytes:
        counts = ExpertCounts(layer=0, kind=ROUTED, counts=slots)
        run = SyntheticRun(run_id="slots", world_size=1, num_layers=1)
        ranks = [replace(r, placement_version=version, experts=(counts,)) for r in run.step(step)]
        return request(ranks).SerializeToString()

    sql = (
        "SELECT placement_version, groupArray(count) AS n FROM (SELECT * FROM expert_loads FINAL "
        "WHERE run_id = 'slots' ORDER BY step, expert) GROUP BY placement_version, step ORDER BY step"
    )
    with collector(tmp_path / "run") as process:
        for version, row in ((1, first), (2, second)):
            post(process, placement_span(report(version, (row,), run_id="slots", step=version)))
            process.post(counted(version, version))
        assert process.terminate() == 0
    with collector(tmp_path / "run") as process:
        process.post(counted(3, 1))
        wait_for(process, "SELECT uniqExact(step) AS n FROM expert_loads WHERE run_id = 'slots'", 3)
        rows = query(process, sql)
        assert [row["n"] for row in rows] == [
            [12, 1, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1, 1, 1, 12],
            [12, 1, 1, 1, 1, 1, 1, 1],
        ]
        # An epoch whose map nobody announced stays as it came, and readers are told.
        process.post(counted(4, 9))
        wait_for(process, "SELECT uniqExact(step) AS n FROM step_verdicts WHERE run_id = 'slots'", 4)
        done = moetrace("load", "--run", "slots", "--url", process.http_address, "--json")
        assert done.returncode == 0, done.stderr
        warnings = json.loads(done.stdout)["warnings"]
        assert any("8 under version 1, 8 under version 2, 12 under version 9" in text for text in warnings)
        # Version 1 came back after version 2: both of its stays are read, and nothing between them.
        first = json.loads(
            moetrace("load", "--run", "slots", "--url", process.http_address, "--epoch", "1", "--json").stdout
        )
        assert (first["placement_version"], first["steps"], first["experts"]) == (1, 2, 8)
        assert first["layers"][0]["tokens"] == 2 * slots.sum()
        assert first["layers"][0]["hot_experts"][0] == {"expert": 0, "tokens": 24, "share": 24 / 38}
        assert process.terminate() == 0


def test_without_a_collector_a_verdict_is_written_itself(tmp_path: Path) -> None:
    """Also of a version whose map nobody announced, and once only."""
    directory = tmp_path / "run"
    with collector(directory) as process:
        for step in range(8):
            ranks = [replace(rank, placement_version=1 + step // 4) for rank in RUN.step(step)]
            assert process.post(request(ranks).SerializeToString()).status == 200
        assert process.terminate() == 0
    for _ in range(2):
        done = moetrace("placement", "compare", "--dir", str(directory), "--settle", "0", "--record")
        assert done.returncode == 3, done.stderr
        assert "of the ledger of run moved: not enough evidence" in done.stderr
    listed = json.loads(moetrace("placement", "list", "--dir", str(directory), "--json").stdout)["rows"]
    assert [row["event"] for row in listed] == ["applied", "applied", "judged"]
    assert moetrace("placement", "verify", "--dir", str(directory)).returncode == 0


def test_without_a_collector_the_store_is_written_to_itself(tmp_path: Path) -> None:
    """A record in force and a proposal after it, linked behind what the collector wrote."""
    directory = tmp_path / "run"
    with collector(directory) as process:
        post(process, placement_span(report(1, EVEN, run_id="r")))
        assert process.terminate() == 0
    record = tmp_path / "record.json"
    for version, rows, extra in ((2, SWAPPED, {"in_force_from_step": 7}), (3, EVEN, {})):
        told = {"ranks": 4, "physical_to_logical": rows, "version": version, "run_id": "r", **extra}
        record.write_text(json.dumps(told))
        done = moetrace("placement", "record", str(record), "--dir", str(directory), "--json")
        assert done.returncode == 0, done.stderr
        row = json.loads(done.stdout)
        assert (row["sequence"], row["previous_version"]) == (version - 1, version - 1)
        assert row["experts_copied"] == 2
    listed = json.loads(moetrace("placement", "list", "--dir", str(directory), "--json").stdout)["rows"]
    assert [(row["event"], row["step"]) for row in listed] == [
        ("announced", 0), ("announced", 7), ("proposed", None),
    ]  # fmt: skip
    assert moetrace("placement", "verify", "--dir", str(directory)).returncode == 0
    shown = moetrace("placement", "show", "--version", "2", "--dir", str(directory)).stdout
    assert json.loads(shown[shown.index("{") :])["rows"][0]["document"]["migration"]["moves"] == [
        [0, 0, 1],
        [0, 2, 0],
    ]


def test_a_changed_row_is_named(tmp_path: Path) -> None:
    """Someone who can write to the store changes a threshold: verify exits with 1 and names the row."""
    with collector(tmp_path / "run") as process:
        for version, row in ((1, EVEN), (2, SWAPPED), (3, EVEN)):
            post(process, placement_span(report(version, row, run_id="r", step=version)))
        assert process.terminate() == 0
    tamper = (
        "import sys, chdb\n"
        "c = chdb.connect(sys.argv[1])\n"
        "c.query(\"ALTER TABLE moetrace.placement_ledger UPDATE proposed_by = 'x' WHERE sequence = 1 "
        'SETTINGS mutations_sync = 1")\n'
        'c.query("ALTER TABLE moetrace.placement_ledger DELETE WHERE sequence = 0 '
        'SETTINGS mutations_sync = 1")\n'
        "c.close()\n"
    )
    subprocess.run([sys.executable, "-c", tamper, str(tmp_path / "run" / "store")], check=True, timeout=120)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "moetrace_collectors.cli",
            "placement",
            "verify",
            "--dir",
            str(tmp_path / "run"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "changed: row 1 (announced, version 2) was changed" in done.stdout
    assert "missing: row 0 is missing" in done.stdout
