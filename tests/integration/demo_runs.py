"""Runs `moetrace demo` as a user does and reads its JSON document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_demo(directory: Path, *options: str, timeout_s: float = 240.0) -> dict[str, Any]:
    """The JSON document of one demo run."""
    done = demo_process("--dir", str(directory), "--json", *options, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def demo_process(*options: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """`moetrace demo` with options, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "moetrace_collectors.cli", "demo", *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )


def share_named(document: dict[str, Any], rank: int, phase: str, first_step: int = 5) -> float:
    """Share of the steps behind the warm-up whose verdict names this rank and phase."""
    verdicts = [verdict for verdict in document["verdicts"] if verdict["step"] >= first_step]
    named = sum(v["rank"] == rank and v["phase"] == phase for v in verdicts)
    return named / len(verdicts)
