"""Ranks of a test as processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from integration.collector_process import environment


def run_ranks(worker: Path, arguments: Sequence[Sequence[str | Path]], *, timeout_s: float) -> None:
    """Run a script once per rank, with each rank's arguments, until all have ended; none is left running.

    Raises:
        AssertionError: a rank failed; the message has what all of them printed.
        subprocess.TimeoutExpired: one took longer.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, worker, *of_rank],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for of_rank in arguments
    ]
    try:
        logs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(logs)
