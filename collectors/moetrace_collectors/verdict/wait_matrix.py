"""Slow rank or slow link from an N x N wait matrix: how long rank i waited for the rows of rank j (pure).

Communication libraries that count waits inside the kernel write such matrices. Durations alone cannot tell
whose link is slow, these can::

              j = 0   1   2   3
    i = 0         .   .   X   .
        1         .   .   X   .       a column: everybody waits for rank 2, which is late or sends slowly
        2         .   .   .   .
        3         X   X   X   .       a row: rank 3 waits for everybody, it receives slowly
                                      a point: one link between two ranks that are fine otherwise
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LINE_FACTOR = 3.5
"""A line is slow if its mean passes this many times the mean of all other entries.

The field's rule takes 3 times the mean of the whole matrix, which a slow line raises itself: three slow lines
of eight hide each other.
"""
POINT_FACTOR = 5.0
"""A point is slow if it passes this many times the medians of its own row and of its own column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinks:
    """What sticks out of a wait matrix; ranks in ascending order."""

    rows: tuple[int, ...]
    """Ranks that wait for everybody."""
    columns: tuple[int, ...]
    """Ranks that everybody waits for."""
    points: tuple[tuple[int, int], ...]
    """(waiting rank, awaited rank) outside slow rows and columns."""


def slow_links(waits: npt.ArrayLike) -> SlowLinks:
    """Slow rows, columns and points of a square matrix of non-negative waits; 0 = no such pair.

    Raises:
        ValueError: not a square matrix, or a negative or non-finite wait.
    """
    matrix = np.asarray(waits, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"wait matrix: a square matrix expected, got shape {matrix.shape}")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise ValueError("wait matrix: waits must be finite and not negative")
    rows, columns = _slow_lines(matrix), _slow_lines(matrix.T)
    return SlowLinks(rows=rows, columns=columns, points=_slow_points(matrix, rows, columns))


def _slow_lines(matrix: npt.NDArray[np.float64]) -> tuple[int, ...]:
    size = len(matrix)
    if size < 2:
        return ()
    sums = matrix.sum(axis=1)
    means = sums / size
    others = (sums.sum() - sums) / (size * (size - 1))
    slow = (means > LINE_FACTOR * others) & (means > 0)
    return tuple(np.flatnonzero(slow).tolist())


def _slow_points(
    matrix: npt.NDArray[np.float64], rows: tuple[int, ...], columns: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    usual = np.maximum(_medians(matrix)[:, None], _medians(matrix.T)[None, :])
    slow = (matrix > POINT_FACTOR * usual) & (usual > 0)
    slow[list(rows)] = False
    slow[:, list(columns)] = False
    return tuple((int(i), int(j)) for i, j in np.argwhere(slow))


def _medians(matrix: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Median of each row over pairs that exist."""
    return np.array([np.median(row[row > 0]) if (row > 0).any() else 0.0 for row in matrix])
