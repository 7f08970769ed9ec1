"""N x N wait matrices (row waits for column): which rank or link is slow. The finding is pure.

DeepEP's low-latency kernels can sum what each rank waited for each other rank. A slow rank shows as a
column (everyone waits for it), a rank that is slow to receive as a row, a slow link as one point.

A column or row is slow when its mean is more than `LINE_FACTOR` x the median column's or row's mean. The
median and not the mean, because slow lines raise a mean themselves: of eight ranks, one that is ten times
as slow as the rest is only 4.7 x the mean, and two of them hide behind each other. So that one point does
not pass for a line, most of the line's cells must be high as well. Rows are looked at once more without the
slow columns and columns without the slow rows, since each inflates the other.

A point is slow when it is more than `POINT_FACTOR` x the median both of its row and of its column, and
neither is slow as a whole: a link stands out of both ends' other links.

Cells of 0 are pairs that exchange nothing (other nodes in a layered all-to-all) and count for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetrace_collectors.model import FloatArray
from moetrace_collectors.offline.source import bad_file

LINE_FACTOR = 4.5
LINE_MEDIAN_FACTOR = 2.0
"""The median cell of a slow line is more than this many times the typical line's median cell."""
POINT_FACTOR = 5.0
LEAST_RANKS = 3
"""With two ranks there is nothing to compare with."""
MAX_RANKS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitFinding:
    """What is slow in one matrix."""

    name: str
    size: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    points: tuple[tuple[int, int], ...]
    """(row, column)."""


def find_slow(name: str, matrix: FloatArray) -> WaitFinding:
    """Slow rows, columns and points of one square matrix of waits of 0 or more."""
    size = len(matrix)
    if size < LEAST_RANKS:
        return WaitFinding(name=name, size=size, rows=(), columns=(), points=())
    waits = np.where(matrix > 0, matrix, np.nan)
    rows, columns = _slow_lines(waits), _slow_lines(waits.T)
    rows, columns = (
        sorted({*rows, *_slow_lines(_without(waits, columns))}),
        sorted({*columns, *_slow_lines(_without(waits.T, rows))}),
    )
    return WaitFinding(
        name=name,
        size=size,
        rows=tuple(rows),
        columns=tuple(columns),
        points=_slow_points(waits, rows, columns),
    )


def _without(waits: FloatArray, columns: list[int]) -> FloatArray:
    kept = waits.copy()
    kept[:, columns] = np.nan
    return kept


def _slow_lines(waits: FloatArray) -> list[int]:
    """Rows whose mean is far above the median row's."""
    present = ~np.isnan(waits)
    some = present.any(axis=1)
    if int(some.sum()) < LEAST_RANKS:
        return []
    means = np.where(present, waits, 0.0).sum(axis=1) / np.maximum(present.sum(axis=1), 1)
    medians = np.zeros(len(waits))
    medians[some] = np.nanmedian(waits[some], axis=1)
    far = means > LINE_FACTOR * float(np.median(means[some]))
    most = medians > LINE_MEDIAN_FACTOR * float(np.median(medians[some]))
    return np.flatnonzero(some & far & most).tolist()


def _slow_points(waits: FloatArray, rows: list[int], columns: list[int]) -> tuple[tuple[int, int], ...]:
    quiet = waits.copy()
    quiet[rows, :] = np.nan
    quiet[:, columns] = np.nan
    row_median, column_median = _medians(quiet), _medians(quiet.T)
    slow = (quiet > POINT_FACTOR * row_median[:, None]) & (quiet > POINT_FACTOR * column_median[None, :])
    return tuple((int(row), int(column)) for row, column in np.argwhere(slow))


def _medians(waits: FloatArray) -> FloatArray:
    """Median of each row's cells; infinite where a row has too few to compare with."""
    medians = np.full(len(waits), np.inf)
    enough = (~np.isnan(waits)).sum(axis=1) >= LEAST_RANKS
    if enough.any():
        medians[enough] = np.nanmedian(waits[enough], axis=1)
    return medians


def matrices_in(document: object) -> dict[str, Any]:
    """Candidates for matrices in a parsed JSON document by name; empty where it holds none.

    Known forms: a bare list of rows, an object with `matrix`, and an object of such objects (or of bare
    lists) by name.
    """
    if _is_square(document):
        return {"matrix": document}
    if not isinstance(document, Mapping):
        return {}
    if _is_square(document.get("matrix")):
        return {str(document.get("name", "matrix")): document["matrix"]}
    found = {}
    for name, value in document.items():
        inner = value.get("matrix") if isinstance(value, Mapping) else value
        if not _is_square(inner):
            return {}
        found[str(name)] = inner
    return found


def checked_matrix(value: object, path: Path, place: str) -> FloatArray:
    """A square matrix of finite numbers of 0 or more.

    Raises:
        UsageError: anything else.
    """
    try:
        matrix = np.asarray(value)
    except (ValueError, OverflowError, RecursionError) as error:
        raise bad_file(path, place, "rows of numbers of equal length expected") from error
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.dtype.kind not in "iuf":
        raise bad_file(path, place, "square matrix of numbers expected")
    if len(matrix) > MAX_RANKS:
        raise bad_file(path, place, f"at most {MAX_RANKS} ranks expected, got {len(matrix)}")
    waits: FloatArray = matrix.astype(np.float64)
    if not np.isfinite(waits).all() or (waits < 0).any():
        raise bad_file(path, place, "finite waits of 0 or more expected")
    return waits


def _is_square(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, list) and len(row) == len(value) for row in value)
        and not isinstance(value[0][0], list | dict | str)
    )
