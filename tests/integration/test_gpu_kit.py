"""The GPU kit runs: on a CPU every part that needs no GPU holds, and the rest says that it was skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KIT = Path(__file__).resolve().parents[2] / "benchmarks/gpu/run_all.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The kit in a process of its own."""
    return subprocess.run(
        [KIT, *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_kit_runs_without_a_gpu_and_says_what_it_skipped(tmp_path: Path) -> None:
    """Numerics, counts and compile pass; sync, kernel times, CUPTI and graphs are skipped; nothing fails."""
    result = run("--device", "cpu", "--quick", "--output", str(tmp_path / "results.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    outcomes = json.loads((tmp_path / "results.json").read_text())["outcomes"]
    states: dict[str, list[str]] = {}
    for outcome in outcomes:
        states.setdefault(outcome["state"], []).append(outcome["name"])
        assert outcome["name"] in result.stdout
    assert len(outcomes) == 12
    assert set(states) == {"pass", "measured", "skipped"}
    assert len(states["pass"]) == 3
    assert len(states["skipped"]) == 6


def test_without_a_gpu_the_kit_says_so_in_one_line() -> None:
    """No traceback, and the way to try it anyway."""
    result = subprocess.run(
        [KIT],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].startswith("run_all: torch sees no CUDA device here")
