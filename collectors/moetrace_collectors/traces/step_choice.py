"""Which steps of a run to export: the slow ones, some by number, or all."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moetrace_collectors.errors import UsageError
from moetrace_collectors.traces import store_queries as queries
from moetrace_collectors.views.store_rows import Parameters, Store
from moetrace_schemas.identity import HIGHEST_STEP

SLOW = 10
"""Steps that `slow` chooses."""
MOST = 1000
"""Steps of one export: a trace of more can hardly be looked at."""
_FORM = "slow, slow:20, all, or numbers and ranges as in 5,7,10-20 expected"
_SLOW = re.compile(r"slow(?::(\d{1,6}))?")
_RANGE = re.compile(r"(\d{1,19})(?:-(\d{1,19}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """What was asked for."""

    slow: int = 0
    """So many of the costliest; 0 = by number."""
    ranges: tuple[tuple[int, int], ...] = ()
    """First and last, both included."""


def parse_steps(text: str) -> StepChoice:
    """A choice from its text.

    Raises:
        ValueError: it is none.
    """
    slow = _SLOW.fullmatch(text)
    if slow is not None:
        wanted = int(slow[1] or SLOW)
        if not 1 <= wanted <= MOST:
            raise ValueError(f"slow:{wanted}: 1 to {MOST} steps can be exported at once")
        return StepChoice(slow=wanted)
    if text == "all":
        return StepChoice(ranges=((0, HIGHEST_STEP),))
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{_FORM}, got {part.strip()!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > HIGHEST_STEP:
            raise ValueError(f"{part.strip()}: a range from the lower to the higher step expected")
        ranges.append((first, last))
    return StepChoice(ranges=tuple(ranges))


def chosen_steps(store: Store, run_id: str, choice: StepChoice) -> tuple[int, ...]:
    """Numbers of the joined steps that a choice means, ascending.

    Raises:
        UsageError: none of them has been joined, a single one has not, or there are too many.
    """
    if choice.slow:
        rows = store.rows(queries.SLOW_STEPS, {"run": run_id, "limit": choice.slow})
        found = {int(row["step"]) for row in rows}
    else:
        found = set()
        for first, last in choice.ranges:
            parameters: Parameters = {"run": run_id, "first": first, "last": last, "limit": MOST + 1}
            between = {int(row["step"]) for row in store.rows(queries.STEPS_BETWEEN, parameters)}
            if first == last and not between:
                raise UsageError(f"step {first} is not among the joined steps of run {run_id!r}")
            found |= between
    if not found:
        raise UsageError(f"run {run_id!r} has no joined step of those asked for: check --steps")
    if len(found) > MOST:
        raise UsageError(f"--steps chooses more than {MOST} steps: choose fewer, as in slow:20 or 5,7,10-20")
    return tuple(sorted(found))
