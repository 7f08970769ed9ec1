"""Questions to a store that name steps: how they are asked, and how many steps one of them names. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

Ask = Callable[[str, Mapping[str, Any]], list[Mapping[str, Any]]]
"""Rows of a query with parameters."""
StepKey = tuple[str, int]
"""(run id, step)"""

STEPS_PER_QUESTION = 1_000
"""Step numbers that one query names; a server takes 128 KiB in one parameter."""


def in_questions(keys: Iterable[StepKey]) -> list[tuple[str, list[int]]]:
    """Steps by run, in their order, cut where the run changes and after `STEPS_PER_QUESTION`."""
    cut: list[tuple[str, list[int]]] = []
    for run_id, of_run in groupby(keys, key=lambda key: key[0]):
        steps = [step for _, step in of_run]
        cut += [
            (run_id, steps[start : start + STEPS_PER_QUESTION])
            for start in range(0, len(steps), STEPS_PER_QUESTION)
        ]
    return cut
