"""Which rank each trace of a set of files is: told by the file, by its name, or by its place among them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moetrace_collectors.offline.rank_trace import MAX_RANKS, RankTrace

_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,7})", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenTrace:
    """A trace file that is left out; it keeps its place all the same."""

    path: Path
    is_sure: bool
    """False where it may be no trace at all: it counts as one if it is named as those that were read."""


def rank_in_name(path: Path) -> int:
    """The rank that the name of a file tells; -1 where it tells none."""
    named = _RANK_IN_NAME.search(path.name)
    return int(named[1]) if named and int(named[1]) < MAX_RANKS else -1


def number_traces(
    found: Sequence[RankTrace | BrokenTrace], warnings: list[str]
) -> tuple[list[RankTrace], set[int]]:
    """Every trace with a rank of its own, and the ranks that are joined with no other.

    Ranks that the files tell are kept. Files that tell none are numbered in their order, broken ones with
    them: no rank takes the number of another because that one's file is broken. Where several tell the same
    rank they are traces of different things, so all but the first get a free number and are looked at alone.
    """
    entries = _of_traces(found)
    told = {rank for rank in map(_told, entries) if rank >= 0}
    free = (number for number in range(len(entries) + len(told) + 1) if number not in told)
    by_place = any(isinstance(one, RankTrace) and not one.rank_told for one in entries)
    numbered: list[RankTrace] = []
    taken: set[int] = set()
    alone: set[int] = set()
    broken: list[str] = []
    for entry in entries:
        if isinstance(entry, BrokenTrace):
            broken += _broken(entry, free, by_place=by_place)
            continue
        if entry.rank_told and entry.rank not in taken:
            taken.add(entry.rank)
            numbered.append(entry)
            continue
        number = next(free)
        if entry.rank_told:
            warnings.append(
                f"{entry.source}: rank {entry.rank} is there already; shown as {number}, joined with none"
            )
            alone.add(number)
        elif len(entries) > 1:
            warnings.append(f"{entry.source}: does not tell its rank; numbered {number}")
        taken.add(number)
        numbered.append(replace(entry, rank=number))
    # First, so that they are among those that are shown.
    warnings[:0] = broken
    return numbered, alone


def _of_traces(found: Sequence[RankTrace | BrokenTrace]) -> list[RankTrace | BrokenTrace]:
    names = {_without_digits(Path(one.source)) for one in found if isinstance(one, RankTrace)}
    return [
        one
        for one in found
        if isinstance(one, RankTrace) or one.is_sure or _without_digits(one.path) in names
    ]


def _without_digits(path: Path) -> tuple[Path, str]:
    return path.parent, _DIGITS.sub("", path.name)


def _told(entry: RankTrace | BrokenTrace) -> int:
    if isinstance(entry, BrokenTrace):
        return rank_in_name(entry.path)
    return entry.rank if entry.rank_told else -1


def _broken(entry: BrokenTrace, free: Iterator[int], *, by_place: bool) -> list[str]:
    rank = rank_in_name(entry.path)
    if rank >= 0:
        return [f"the trace of rank {rank} is left out: {entry.path} is broken"]
    # Beside traces that all tell their ranks, the one that is broken would have told its own.
    return [f"the trace of rank {next(free)} is left out: {entry.path} is broken"] if by_place else []
