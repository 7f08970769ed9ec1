"""`moetrace demo` as a user meets it: documents, stores, options, and mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from integration.demo_runs import demo_process, run_demo

MODELS = ("olmoe", "qwen3", "mixtral", "deepseek_v3")


def query(directory: Path, sql: str) -> list[dict[str, Any]]:
    """Rows of a query through `moetrace query`."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "moetrace_collectors.cli", "query", "--dir", str(directory)),
            *("--format", "JSONEachRow", sql),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.multirank
@pytest.mark.parametrize("model", MODELS)
def test_the_document_is_valid_and_every_step_is_judged(tmp_path: Path, model: str) -> None:
    """For each model: the JSON document obeys its published schema, and no rank step is lost on the way."""
    document = run_demo(tmp_path / "run", "--ranks", "2", "--steps", "12", "--model", model)
    schema = json.loads(
        resources.files("moetrace_schemas.json").joinpath("demo_result.schema.json").read_text()
    )
    jsonschema.validate(document, schema)
    assert [v["step"] for v in document["verdicts"]] == list(range(12))
    assert document["accounting"]["rank_steps"] == 24
    assert document["accounting"]["tracer_drops"] == {}
    assert Path(document["report"]).stat().st_size > 10_000
    sent = query(
        tmp_path / "run",
        "SELECT layer, destination_ep_rank AS rank, sum(rows) AS rows FROM rank_traffic "
        "WHERE phase = 'dispatch' GROUP BY layer, rank ORDER BY layer, rank",
    )
    received = query(
        tmp_path / "run",
        "SELECT layer, rank, sum(count) AS rows FROM expert_loads "
        "WHERE count_kind = 'received' GROUP BY layer, rank ORDER BY layer, rank",
    )
    assert sent == received
    assert sum(int(row["rows"]) for row in sent) > 0


@pytest.mark.multirank
def test_sampling_takes_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    """--sample 1/3: some steps are sampled, and each of them joins completely."""
    document = run_demo(tmp_path / "run", "--ranks", "2", "--steps", "40", "--sample", "1/3")
    assert 2 <= len(document["verdicts"]) < 40
    assert document["accounting"]["steps_by_closed_by"] == {"complete": len(document["verdicts"])}


@pytest.mark.multirank
def test_keep_running_leaves_a_collector_that_answers(tmp_path: Path) -> None:
    """--keep-running: the collector stays up, serves metrics and SQL, and stops on SIGTERM."""
    done = demo_process(*("--dir", str(tmp_path / "run"), "--ranks", "2", "--steps", "8", "--keep-running"))
    owner = json.loads((tmp_path / "run" / "collector.json").read_text())
    try:
        assert done.returncode == 0, done.stderr
        assert owner["http_address"] in done.stdout
        with urllib.request.urlopen(f"{owner['http_address']}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        assert "moetrace_collector_received_total 16.0" in text
        assert query(tmp_path / "run", "SELECT count() AS n FROM step_verdicts")[0]["n"] in (8, "8")
    finally:
        os.kill(owner["pid"], signal.SIGTERM)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--inject", "rank=9,phase=router,delay_ms=5"], "ranks 0 to 3"),
        (
            ["--inject", "rank=1,phase=nothing,delay_ms=5"],
            "outside, router, permute, dispatch, expert_gemm, combine, unpermute",
        ),
        (["--inject", "rank=1,phase=router,delay_ms=5,layer=7"], "MoE layers 0, 1, 2, 3"),
        (["--inject", "rank=1,phase=router"], "delay_ms= is missing"),
        (["--inject", "nonsense"], "rank="),
        (["--inject", "rank=1,phase=router,delay_ms=-3"], "delay_ms"),
        (["--ranks", "5"], "one of 1, 2, 4, 8, 16, 32"),
        (["--ranks", "0"], "--ranks 0"),
        (["--steps", "0"], "1 to 100000"),
        (["--sample", "2/3"], "1/N"),
        (["--dir", "/proc/moetrace-run"], "/proc/moetrace-run"),
        (["--dir", "bad name"], "names the run"),
    ],
)
def test_wrong_options_get_one_line_and_exit_code_2(options: list[str], expected: str) -> None:
    """A mistake is answered before anything starts: one line that names it and what is allowed."""
    done = demo_process(*options, timeout_s=60)
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    """A second run into the same directory is refused, in one line."""
    (tmp_path / "run" / "store").mkdir(parents=True)
    done = demo_process("--dir", str(tmp_path / "run"), timeout_s=60)
    assert done.returncode == 2
    assert "holds a run already" in done.stderr
