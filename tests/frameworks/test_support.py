"""The support table says what is registered, tested and installed, and the page says what the table says."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from frameworks import support
from moetrace.instrument.find_layers import ADAPTERS

HERE = Path(__file__).resolve().parent
OWN = {"reference"}
"""Adapters of no framework."""
COLLECTIVES = {"deepep"}
"""Exchanges that layers of several frameworks call: in the table, and no adapter of layers."""


def test_the_page_holds_the_table() -> None:
    """`python tests/frameworks/support.py` has been run since the table changed."""
    text = support.README.read_text(encoding="utf-8")
    assert support.rendered(text) == text


def test_every_registered_adapter_has_a_row_and_every_row_an_adapter() -> None:
    """Nothing is supported in silence, nothing is claimed that is not there."""
    registered = {getattr(import_module(module), name).name for module, name, _ in ADAPTERS}
    assert {row["adapter"] for row in support.frameworks()} == (registered - OWN) | COLLECTIVES


def test_rows_name_tests_that_exist_and_versions_that_are_installed_for_them() -> None:
    """A version in the table is the one that `make test-frameworks` installs."""
    for row in support.frameworks():
        for name in row["test"].split(", "):
            assert (HERE / name).exists() or (support.REPOSITORY / name).exists(), name
        if "environment" in row:
            lists = sorted((HERE / "requirements").glob(f"{row['environment']}.*"))
            pinned = re.findall(r"==(\S+)", "\n".join(path.read_text() for path in lists))
            assert str(row["version"]) in pinned, row["name"]
