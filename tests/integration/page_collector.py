"""A collector whose store holds the run of page_store.py, for tests of the page and its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from integration.collector_process import CollectorProcess, collector, run_script


@contextmanager
def page_collector(
    directory: Path, *, ranks: int, layers: int, experts: int, steps: int
) -> Iterator[CollectorProcess]:
    """Fill a store in a child process, then serve it."""
    run_script("page_store", directory / "store", ranks, layers, experts, steps)
    with collector(directory) as process:
        yield process
