"""N x N wait matrices (row waits for column): which rank or link is slow. Pure.

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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import FloatArray, RankStep
from moetrace_schemas.enums import PHASE_CODE, Phase

LINE_FACTOR = 4.5
LINE_MEDIAN_FACTOR = 2.0
"""The median cell of a slow line is more than this many times the typical line's median cell."""
POINT_FACTOR = 5.0
LEAST_RANKS = 3
"""With two ranks there is nothing to compare with."""
MOST_NAMED = 3
"""Slow lines and points that a sentence names."""


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


def group_matrix(
    rank_steps: Sequence[RankStep], ep_group: int, phase: Phase
) -> tuple[FloatArray, tuple[int, ...]] | None:
    """Waits of one expert-parallel group in one step, and its global ranks in order of the matrix.

    None where a rank of the group tells none: a row of zeros would pass for a rank that never waits.
    """
    code = PHASE_CODE[phase]
    group = [one for one in rank_steps if one.ep_group == ep_group]
    size = max((one.ep_size for one in group), default=0)
    matrix = np.zeros((size, size))
    ranks = dict.fromkeys(range(size), -1)
    for one in group:
        for entry in one.waits:
            if entry.phase == code and one.ep_size == size:
                matrix[one.ep_rank] += entry.cycles
                ranks[one.ep_rank] = one.rank
    if size < LEAST_RANKS or -1 in ranks.values():
        return None
    return matrix, tuple(ranks.values())


def slow_ends(rank_steps: Sequence[RankStep], ep_group: int, phase: Phase) -> str:
    """What kernels' waits say of a group's exchanges, as a clause; empty where they say nothing."""
    known = group_matrix(rank_steps, ep_group, phase)
    if known is None:
        return ""
    matrix, ranks = known
    found = find_slow(str(phase), matrix)
    said = [f"all ranks waited long for rank {ranks[at]}" for at in found.columns]
    said += [f"rank {ranks[at]} waited long for all ranks" for at in found.rows]
    said += [f"rank {ranks[row]} waited long for rank {ranks[column]} alone" for row, column in found.points]
    more = len(said) - MOST_NAMED
    return "; ".join(said[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
