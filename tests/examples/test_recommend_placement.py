"""The example that goes from a recording to a recommendation in one command does so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "recommend_placement.py"
PATHS = os.pathsep.join(str(ROOT / name) for name in ("collectors", "schemas", "tests"))


def recommend(*arguments: str) -> str:
    """What the example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_a_dump() -> None:
    """Every planner's score, and one sentence that says what to do."""
    said = recommend("tests/data/loads/esft_law_counts.json", "--ranks", "8", "--slots", "72")
    for planner in ("contiguous", "round_robin", "greedy", "eplb", "moetrace"):
        assert f"{planner:12} balanced 0." in said
    assert "assumed: " in said


def test_from_a_recorded_run(tmp_path: Path) -> None:
    """A run directory: two hot experts on one rank of eight are worth a move."""
    directory = tmp_path / "run"
    directory.mkdir()
    subprocess.run(
        [sys.executable, "-m", "simulated_store", str(directory / "store")],
        check=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    said = recommend(str(directory))
    saved = {
        line.split()[0]: float(line.rpartition("saves ")[2].rstrip("%\n"))
        for line in said.splitlines()
        if " saves " in line and " balanced " in line
    }
    assert saved["moetrace"] > 2.0
    assert saved["moetrace"] >= saved["contiguous"]


@pytest.mark.parametrize("command", [line.split()[1:] for line in EXAMPLE.read_text().splitlines()[2:4]])
def test_its_docstring_names_files_that_are_there(command: list[str]) -> None:
    """The commands in it start with this very file."""
    assert command[0] == "examples/recommend_placement.py"
