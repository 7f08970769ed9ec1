"""`moetrace placement verify` and `list` on a long chain: page by page, with nothing left out."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from .collector_process import environment, moetrace, run_script

ROWS = 1_100
FORKED = 199
"""The last number of the first page, so that the fork lies across its end."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a ledger of many pages, one number of which is forked."""
    found = tmp_path_factory.mktemp("long") / "run"
    found.mkdir()
    run_script("long_ledger", found / "store", ROWS, FORKED)
    return found


def test_a_long_chain_is_verified_whole(directory: Path) -> None:
    """Every row is looked at once, and the fork at a page's end is found."""
    done = moetrace("placement", "verify", "--dir", str(directory), "--json")
    (found,) = json.loads(done.stdout)["ledgers"]
    assert (done.returncode, found["rows"]) == (1, ROWS + 1)
    first = found["faults"][0]
    assert (first["kind"], first["sequence"]) == ("forked", FORKED)
    assert {fault["sequence"] for fault in found["faults"]} <= {FORKED, FORKED + 1}
    assert done.stderr == ""
    listed = json.loads(moetrace("placement", "list", "--dir", str(directory), "--json").stdout)["rows"]
    numbers = [row["sequence"] for row in listed]
    assert numbers == sorted([*range(ROWS), FORKED])


def test_a_terminal_sees_how_far_it_is(directory: Path) -> None:
    """A line on standard error that is overwritten, and gone at the end; none into a file."""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "moetrace_collectors.cli", "placement", "verify", "--dir", str(directory)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=120,
        check=False,
    )
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert f"500 of {ROWS + 1} rows\rrun run: 1000 of {ROWS + 1} rows" in said
    assert said.endswith("\r\x1b[K")
    assert f"{ROWS + 1:,} rows".encode() in done.stdout
