"""Renders tests/frameworks/support.yaml into moetrace/adapters/README.md; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).resolve().parent / "support.yaml"
README = REPOSITORY / "moetrace" / "adapters" / "README.md"
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
COLUMNS = (
    "router",
    "permute",
    "dispatch",
    "experts",
    "combine",
    "checks",
    "counts",
    "graphs",
    "compile",
    "backward",
    "tested",
    "note",
)


def frameworks() -> list[dict[str, Any]]:
    """Rows of the table."""
    rows: list[dict[str, Any]] = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))["frameworks"]
    return rows


def table() -> str:
    """The table as Markdown."""
    lines = [f"| framework | {' | '.join(COLUMNS)} |", f"|{'---|' * (len(COLUMNS) + 1)}"]
    for row in frameworks():
        cells = [f"{row['name']} {row['version']}", *(_cell(row[column]) for column in COLUMNS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    # YAML reads yes and no as booleans.
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def rendered(text: str) -> str:
    """The page with the table put in."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    """Write the page, or say that it is out of date."""
    text = README.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        return 0 if rendered(text) == text else 1
    README.write_text(rendered(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
