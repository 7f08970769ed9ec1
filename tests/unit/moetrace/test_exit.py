"""The end of a process that never called `shutdown`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from .otlp_server import Blackhole, FakeCollector

PROGRAM = """
import moetrace
for _ in range(3):
    with moetrace.step():
        pass
print("done", flush=True)
"""


def run(**settings: Any) -> float:
    """Run the program under these settings; returns how long it took to end after its last line."""
    environment = {f"MOETRACE_{name.upper()}": str(value) for name, value in settings.items()}
    process = subprocess.Popen(
        [sys.executable, "-c", f"import moetrace\nmoetrace.init(run_id='exit')\n{PROGRAM}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    start = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    return time.monotonic() - start


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    """A collector that takes everything."""
    server = FakeCollector()
    yield server
    server.close()


def test_what_was_recorded_is_delivered_at_exit(collector: FakeCollector) -> None:
    """The interpreter's end is the deadline of the last export."""
    run(endpoint=collector.endpoint)
    assert len(collector.spans()) == 3


def test_a_collector_that_never_answers_holds_the_exit_up_no_longer_than_configured() -> None:
    """A hanging collector must not hang a job's end."""
    hole = Blackhole()
    assert run(endpoint=hole.endpoint, shutdown_timeout_s=0.5) < 5
    hole.close()
