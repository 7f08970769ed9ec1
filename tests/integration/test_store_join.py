"""Stateless collectors and `moetrace join`: the store's rows give the verdicts of a collector that joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.collector_process import collector, moetrace, rows
from integration.joined_process import filled_store
from joined_store import Told, read_truth
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse_rows import TableRows, verdict_rows
from moetrace_collectors.testing import SyntheticRun, request

RUN = SyntheticRun(run_id="balanced", world_size=4, slow_rank=2)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store filled by collectors that do not join, then joined once."""
    directory = filled_store(tmp_path_factory.mktemp("unjoined"), "unjoined")
    assert rows(directory, "SELECT count() AS n FROM step_verdicts") == [{"n": 0}]
    done = moetrace("join", "--dir", str(directory), "--once", "--join-timeout-s", "0")
    assert (done.returncode, done.stdout) == (0, "judged 280 steps\n"), done.stderr
    return directory


@pytest.fixture(scope="module")
def truth(joined: Path) -> list[Told]:
    """What one engine says of the same rank steps, in order of (run, step)."""
    told = read_truth(joined / "truth")
    return [told[key] for key in sorted(told)]


def expected(truth: list[Told]) -> tuple[TableRows, TableRows]:
    """Rows of step_verdicts and step_barriers."""
    results = [StepResult(joined=t.joined, verdict=t.verdict, loads=()) for t in truth]
    _, barriers, verdicts = verdict_rows(results)
    return verdicts, barriers


def by_name(table: TableRows) -> list[dict[str, Any]]:
    """Rows as dictionaries, without the time, which has its own test."""
    return [
        {name: value for name, value in zip(table.names, row, strict=True) if name != "step_time"}
        for row in zip(*table.columns, strict=True)
    ]


def same(want: object, have: object) -> bool:
    """Whether a value of the store is the one expected; 64-bit numbers may come as text."""
    if isinstance(want, dict):
        assert isinstance(have, dict)
        return {name: int(value) for name, value in have.items()} == want
    if isinstance(want, int) and not isinstance(want, bool) and isinstance(have, str):
        return int(have) == want
    return have == want


@pytest.mark.parametrize(
    ("number", "table", "order"),
    [(0, "step_verdicts", "step"), (1, "step_barriers", "step, ep_group, barrier")],
)
def test_every_column_is_what_the_engine_said(
    joined: Path, truth: list[Told], number: int, table: str, order: str
) -> None:
    """Evidence, reason, rank, layer, phase, cause, runner-up, figures and exchanges: identical."""
    want = by_name(expected(truth)[number])
    have = rows(joined, f"SELECT * FROM {table} FINAL ORDER BY run_id, {order}")
    assert len(have) == len(want)
    for wanted, found in zip(want, have, strict=True):
        for name, value in wanted.items():
            assert same(value, found[name]), (wanted["run_id"], wanted["step"], name, value, found[name])


def test_all_grades_and_several_causes_occur(truth: list[Told]) -> None:
    """The comparison is about something: history, missing ranks and links play a part."""
    assert {str(t.verdict.evidence) for t in truth} == {"clear", "ambiguous", "insufficient"}
    assert {"device", "link"} <= {str(t.verdict.cause) for t in truth}
    assert sum(bool(t.joined.missing_ranks) for t in truth) > 5


def test_what_is_judged_is_not_judged_again(joined: Path) -> None:
    """A second process finds nothing to do."""
    done = moetrace("join", "--dir", str(joined), "--once", "--join-timeout-s", "0")
    assert (done.returncode, done.stdout) == (0, "judged 0 steps\n"), done.stderr


def test_a_stateless_collector_writes_rank_rows_only(tmp_path: Path) -> None:
    """Collect --join=store: what was received was handed to the store; moetrace join names the slow rank."""
    with collector(tmp_path, "--join", "store") as process:
        for step in range(20):
            for rank_step in RUN.step(step):
                assert process.send(request([rank_step])).status == 200
        process.send(request(RUN.step(19)[:1]))
        process.wait_for("moetrace_collector_joined_total", 81)
        assert process.metric("moetrace_collector_received_total") == 81
        assert process.metric("moetrace_collector_joined_total") == 81
        for name in ("late", "duplicate", "rejected"):
            assert process.metric(f"moetrace_collector_{name}_total") == 0
        refused = moetrace("join", "--dir", str(tmp_path), "--once")
        assert refused.returncode == 2
        assert "is owned by the collector" in refused.stderr
        assert process.terminate() == 0
    counts = "SELECT (SELECT count() FROM rank_steps FINAL) AS r, (SELECT count() FROM step_verdicts) AS v"
    assert rows(tmp_path, counts) == [{"r": 80, "v": 0}]
    done = moetrace("join", "--dir", str(tmp_path), "--once")
    assert (done.returncode, done.stdout) == (0, "judged 20 steps\n"), done.stderr
    found = rows(
        tmp_path, "SELECT DISTINCT rank, phase, cause, closed_by FROM step_verdicts FINAL WHERE step >= 8"
    )
    assert found == [{"rank": 2, "phase": "expert_gemm", "cause": "device", "closed_by": "complete"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dir", "/nowhere"), "no store at chdb:///nowhere/store"),
        (("--dsn", "nonsense"), "store dsn 'nonsense'"),
        (("--dsn", "clickhouse://127.0.0.1:1"), "no ClickHouse answers at"),
        (
            ("--dir", "/nowhere", "--join-timeout-s", "-1"),
            "--join-timeout-s and --look-back-hours are 0 or more",
        ),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    """A mistake is one line that names it, and exit code 2."""
    done = moetrace("join", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
