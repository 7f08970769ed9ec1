"""Wait matrices: published cases, and slow lines and points that are put into even ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrace_collectors.errors import UsageError
from moetrace_collectors.offline.wait_matrix import checked_matrix, matrices_in
from moetrace_collectors.verdict.wait_matrix import find_slow

CASES = json.loads((Path(__file__).parents[2] / "data" / "matrices" / "wait_matrices.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_published_cases(name: str) -> None:
    """Slow rows, columns and links as published, and nothing beside them."""
    found = find_slow(name, checked_matrix(CASES[name]["matrix"], Path("m.json"), name))
    published = CASES[name]["published"]
    assert list(found.rows) == published.get("rows", [])
    assert list(found.columns) == published.get("cols", [])
    assert [list(point) for point in found.points] == published.get("points", [])


@given(
    size=st.integers(4, 24),
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["none", "row", "column", "point"]),
    factor=st.integers(8, 1_000),
)
def test_what_is_put_in_is_found(size: int, seed: int, kind: str, factor: int) -> None:
    """In a matrix that varies by a half, one slow line or link and only it; nothing where nothing is."""
    random = np.random.default_rng(seed)
    matrix = random.uniform(100, 150, (size, size))
    row, column = int(random.integers(size)), int(random.integers(size))
    if kind == "row":
        matrix[row] *= factor
    elif kind == "column":
        matrix[:, column] *= factor
    elif kind == "point":
        matrix[row, column] *= factor
    found = find_slow("m", matrix)
    assert found.rows == ((row,) if kind == "row" else ())
    assert found.columns == ((column,) if kind == "column" else ())
    assert found.points == (((row, column),) if kind == "point" else ())


def test_pairs_that_exchange_nothing_count_for_nothing() -> None:
    """Zeros between nodes make no other line slow."""
    matrix = np.kron(np.eye(2), np.full((4, 4), 100.0))
    assert find_slow("m", matrix) == find_slow("m", matrix.T)
    assert not find_slow("m", matrix).columns


@pytest.mark.parametrize("size", [1, 2])
def test_two_ranks_cannot_be_compared(size: int) -> None:
    """There is no third to say which of the two is slow."""
    assert not find_slow("m", np.array([[1.0, 900.0], [1.0, 1.0]])[:size, :size]).points


@pytest.mark.parametrize(
    "value",
    [[[1, 2], [3]], [[1, "a"], [2, 3]], [[1, -1], [2, 3]], [[1, float("nan")], [2, 3]], [1, 2], [[1, 2]]],
)
def test_what_is_no_matrix_is_refused(value: object) -> None:
    """One line with the place."""
    with pytest.raises(UsageError, match=r"m.json: there: .* expected"):
        checked_matrix(value, Path("m.json"), "there")


def test_forms_of_documents() -> None:
    """Bare, named, and several by name; other documents hold none."""
    square = [[1, 2], [3, 4]]
    assert list(matrices_in(square)) == ["matrix"]
    assert list(matrices_in({"matrix": square, "name": "a"})) == ["a"]
    assert list(matrices_in({"a": square, "b": {"matrix": square}})) == ["a", "b"]
    assert matrices_in({"a": square, "b": 5}) == {}
    assert matrices_in([[1, 2, 3]]) == {}
