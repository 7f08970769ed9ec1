"""`moetrace dashboards` as typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def dashboards(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(
        [sys.executable, "-m", "moetrace_collectors.cli", "dashboards", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_build_then_check(tmp_path: Path) -> None:
    """What build wrote is current; a file changed by hand is named and is exit code 1."""
    assert dashboards("build", "--out", str(tmp_path)).returncode == 0
    assert dashboards("check", "--out", str(tmp_path)).returncode == 0
    (tmp_path / "grafana" / "placement.json").write_text("{}")
    done = dashboards("check", "--out", str(tmp_path))
    assert (done.returncode, "grafana/placement.json" in done.stderr) == (1, True)


def test_a_grafana_that_is_not_there_is_one_line() -> None:
    """Exit code 2 and what to check."""
    done = dashboards("push", "--grafana-url", "http://127.0.0.1:1", "--token", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("moetrace: no Grafana answers at http://127.0.0.1:1")
    assert done.stderr.count("\n") == 1
