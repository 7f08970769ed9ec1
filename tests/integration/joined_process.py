"""Fills a store in a process of its own, for tests of the join over a store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from integration.collector_process import ROOT, environment


def filled_store(directory: Path, *how: str) -> Path:
    """A run directory with a store and the truth about it; see joined_store."""
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "joined_store", str(directory / "store"), str(directory / "truth"), *how],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory
