"""Fills a store in a process of its own, for tests of the join over a store."""

from __future__ import annotations

from pathlib import Path

from integration.collector_process import run_script


def filled_store(directory: Path, *how: str) -> Path:
    """A run directory with a store and the truth about it; see joined_store."""
    run_script("joined_store", directory / "store", directory / "truth", *how)
    return directory
