"""House rules that a machine can check in the sources of all four packages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    ROOT / "moetrace",
    ROOT / "collectors/moetrace_collectors",
    ROOT / "schemas/moetrace_schemas",
    ROOT / "dashboards/moetrace_dashboards",
)
MOST_LINES = 500
VAGUE_NAMES = ("utils", "util", "helpers", "helper", "common", "misc")


def modules() -> list[Path]:
    """Every module of the four packages."""
    return sorted(path for package in PACKAGES for path in package.rglob("*.py"))


def is_generated(path: Path) -> bool:
    """Whether the generator wrote it: those may be long."""
    return path.read_text(encoding="utf-8").startswith('"""GENERATED')


def where(path: Path) -> str:
    """Its path from the root of the repository."""
    return str(path.relative_to(ROOT))


def test_all_four_packages_are_looked_at() -> None:
    """A package that moved would make the other tests pass on nothing."""
    assert all(any(path.is_relative_to(package) for path in modules()) for package in PACKAGES)


def test_no_module_is_longer_than_the_cap() -> None:
    """A module does one thing; what needs more lines is two."""
    lengths = {where(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    too_long = {
        name: length
        for name, length in lengths.items()
        if length > MOST_LINES and not is_generated(ROOT / name)
    }
    assert too_long == {}


def test_sources_are_plain_ascii() -> None:
    """Every editor, terminal and diff shows the same."""
    assert [where(path) for path in modules() if not path.read_bytes().isascii()] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    """A module is named after what it does."""
    assert [where(path) for path in modules() if path.stem in VAGUE_NAMES] == []


def test_every_module_says_what_it_is() -> None:
    """Its docstring comes first."""
    assert [
        where(path)
        for path in modules()
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ] == []


def test_every_todo_names_its_issue() -> None:
    """A note without an issue is never done."""
    bare = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")
    assert [where(path) for path in modules() if bare.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_typed_package_says_so(package: Path) -> None:
    """`py.typed` makes type checkers of users read our annotations."""
    assert (package / "py.typed").exists()
