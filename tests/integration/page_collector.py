"""A collector whose store holds the run of page_store.py, for tests of the page and its JSON."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from integration.collector_process import ROOT, CollectorProcess, collector, environment


@contextmanager
def page_collector(
    directory: Path, *, ranks: int, layers: int, experts: int, steps: int
) -> Iterator[CollectorProcess]:
    """Fill a store in a child process, then serve it."""
    paths = os.pathsep.join([str(ROOT / "tests"), environment()["PYTHONPATH"]])
    shape = [str(number) for number in (ranks, layers, experts, steps)]
    subprocess.run(
        [sys.executable, "-m", "page_store", str(directory / "store"), *shape],
        env={**environment(), "PYTHONPATH": paths, "TZ": "UTC"},
        check=True,
        timeout=300,
    )
    with collector(directory) as process:
        yield process
