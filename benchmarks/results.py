"""Writes one benchmark's section of RESULTS.md between its markers, so that each run replaces its own."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
TITLE = (
    "# Measured\n\nRatios are taken side by side in one run; absolute times are of the machine named "
    "and say little by themselves. Not yet measured on a GPU.\n"
)


def write_section(key: str, title: str, text: str) -> None:
    """Replace (or append) the section `key`."""
    section = (
        f"<!-- begin {key} -->\n## {title}\n\nMachine: {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}.\n\n{text}\n<!-- end {key} -->\n"
    )
    have = RESULTS.read_text() if RESULTS.exists() else TITLE
    pattern = re.compile(rf"<!-- begin {re.escape(key)} -->.*?<!-- end {re.escape(key)} -->\n", re.DOTALL)
    found = pattern.search(have)
    RESULTS.write_text(pattern.sub(lambda _: section, have) if found else have.rstrip() + "\n\n" + section)
