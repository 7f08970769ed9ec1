"""The public API is small and frozen: a change of it is a decision, not an accident."""

from __future__ import annotations

from pathlib import Path

import moetrace

from .public_api import lines

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def test_the_public_api_is_the_frozen_one() -> None:
    """Names, signatures, settings and defaults; to change it on purpose, render the snapshot anew."""
    command = "python tests/packaging/public_api.py > tests/packaging/public_api.txt"
    assert list(lines()) == SNAPSHOT.read_text().splitlines(), f"changed on purpose? {command}"


def test_every_exported_name_is_documented() -> None:
    """A reader of `help(moetrace)` finds what each name is for."""
    for name in moetrace.__all__:
        assert getattr(moetrace, name).__doc__, name


def test_exports_are_sorted_by_kind_and_exist_once() -> None:
    """No name twice, and none that is not there."""
    assert len(set(moetrace.__all__)) == len(moetrace.__all__)
    assert all(hasattr(moetrace, name) for name in moetrace.__all__)
