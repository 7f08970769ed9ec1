"""The ingest benchmark runs, and what it sends is all stored."""

from __future__ import annotations

import subprocess
import sys

from integration.collector_process import ROOT, environment

LOADS = 5


def test_a_quick_run_measures_every_load() -> None:
    """Packed, gzipped, without a log, as plain spans and with counts: each load ends with all rows stored."""
    done = subprocess.run(
        [sys.executable, "benchmarks/ingest.py", "--quick"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| p", "| with"))]
    names = [row.split("|")[1].strip() for row in rows if "rows/s" not in row]
    assert len(names) == LOADS
    assert "From the last rank to the verdict" in done.stdout
