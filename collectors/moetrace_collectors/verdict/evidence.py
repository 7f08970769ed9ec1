"""How sure a verdict may be: the suspect's worth against the spread of calm steps.

Fourth stage of the verdict (pure: the history is given). A (rank, phase) stands out where its worth in this
step passes what other ranks rarely reach (a spike), or where its level over recent steps lies beyond the
error of a level, and this step shows it too (a persistent fault that hides in the noise of single steps).
The suspect is the largest that stands out; `clear` asks in addition that it is material, that the waits
confirm it, and that no other is as large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrace_collectors.verdict.attribution import Blame
from moetrace_collectors.verdict.history import LEVEL_WINDOWS, MIN_STEPS, RunHistory
from moetrace_schemas.enums import PHASE_BY_CODE, Evidence

MATERIAL = 0.02
"""Part of the step that a worth must reach to be clear: below it there is nothing to act on."""
MATERIAL_UNKNOWN_SPREAD = 0.04
"""The same while the spread is not known yet; such a verdict is never clear."""
LEVEL_ERRORS = 6.0
"""Standard errors that a persistent level must lie above zero."""
RIVAL = 0.8
"""A runner-up of this part of the suspect's worth is as large within the error."""
CONFIRMED = 0.5
"""Part of the suspect's worth that the waits must confirm."""
CANDIDATES = 8

Cell = tuple[int, int]
"""Index into Blame.ranks, phase code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The evidence, in one sentence, and whom it names."""

    evidence: Evidence
    reason: str
    suspect: Cell | None = None
    runner_up: Cell | None = None


def grade(blame: Blame, step_ns: int, history: RunHistory) -> Grade:
    """Name the suspect of one step, or say why none can be named."""
    cells = _largest(blame.worth_ns.astype(np.float64))
    if not cells or step_ns <= 0:
        reason = "No rank did more work than another before any exchange."
        return Grade(evidence=Evidence.INSUFFICIENT, reason=reason)
    if len(history) < MIN_STEPS:
        return _grade_without_history(blame, cells, step_ns, len(history))
    margin = history.margin()
    bars = {cell: history.usual(int(blame.ranks[cell[0]])) for cell in cells}
    parts = {cell: float(blame.worth_ns[cell]) / step_ns for cell in cells}
    spikes = [cell for cell in cells if parts[cell] >= max(MATERIAL, margin * bars[cell])]
    steady = [cell for cell in _largest(blame.deviation_ns) if _is_steady(blame, cell, step_ns, history)]
    raised = [cell for cell in cells if parts[cell] >= max(MATERIAL, bars[cell])]
    standing_out = spikes + steady
    if not standing_out and not raised:
        first = cells[0]
        reason = (
            f"No extension above the noise: the largest, {_name(blame, first)}, is {parts[first]:.1%} of the "
            f"step, and others reach {bars[first]:.1%} in calm steps."
        )
        return Grade(evidence=Evidence.INSUFFICIENT, reason=reason)
    suspect = max(standing_out or raised, key=lambda cell: blame.worth_ns[cell])
    runner_up = next((cell for cell in cells if cell != suspect), None)
    doubt = _doubt(blame, suspect, runner_up, stands_out=bool(standing_out))
    if doubt:
        return Grade(evidence=Evidence.AMBIGUOUS, reason=doubt, suspect=suspect, runner_up=runner_up)
    part = float(blame.worth_ns[suspect]) / step_ns
    if suspect in spikes:
        why = f"others reach {bars[suspect]:.1%} in calm steps"
    else:
        why = "it has been slower than the others there for many steps"
    return Grade(
        evidence=Evidence.CLEAR,
        reason=f"{_name(blame, suspect)} extended the step by {part:.1%}; {why}, and the waits agree.",
        suspect=suspect,
        runner_up=runner_up,
    )


def _largest(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[Cell]:
    """The cells with the largest positive values, descending; ties in ascending (rank, phase)."""
    flat = values.ravel()
    order = np.argsort(-flat, kind="stable")[:CANDIDATES]
    num_phases = values.shape[1]
    return [(int(i) // num_phases, int(i) % num_phases) for i in order if flat[i] > 0]


def _is_steady(blame: Blame, cell: Cell, step_ns: int, history: RunHistory) -> bool:
    """Whether a rank's level in a phase is beyond its error and this step shows it."""
    if blame.worth_ns[cell] <= 0:
        return False
    levels = [history.level(int(blame.ranks[cell[0]]), cell[1], window) for window in LEVEL_WINDOWS]
    return any(
        level >= max(MATERIAL, LEVEL_ERRORS * error) and blame.deviation_ns[cell] >= level / 2 * step_ns
        for level, error in levels
    )


def _doubt(blame: Blame, suspect: Cell, runner_up: Cell | None, *, stands_out: bool) -> str:
    """Why the verdict is not clear; empty if it is."""
    worth = blame.worth_ns[suspect]
    if not stands_out:
        return f"{_name(blame, suspect)} is above what other ranks usually reach, but not by enough."
    if blame.confirmed_ns[suspect] < CONFIRMED * worth:
        return f"{_name(blame, suspect)} did the most work, but the others' waits do not confirm it."
    if runner_up is not None and blame.worth_ns[runner_up] >= RIVAL * worth:
        return f"{_name(blame, suspect)} and {_name(blame, runner_up)} extended the step alike."
    return ""


def _grade_without_history(blame: Blame, cells: list[Cell], step_ns: int, steps: int) -> Grade:
    suspect = cells[0]
    runner_up = cells[1] if len(cells) > 1 else None
    part = float(blame.worth_ns[suspect]) / step_ns
    known = f"only {steps} of {MIN_STEPS} earlier steps to compare with"
    confirmed = blame.confirmed_ns[suspect] >= CONFIRMED * blame.worth_ns[suspect]
    rival = runner_up is not None and blame.worth_ns[runner_up] >= RIVAL * blame.worth_ns[suspect]
    if part < MATERIAL_UNKNOWN_SPREAD or rival or not confirmed:
        return Grade(
            evidence=Evidence.INSUFFICIENT,
            reason=f"Nothing sticks out of the step by itself, and there are {known}.",
        )
    return Grade(
        evidence=Evidence.AMBIGUOUS,
        reason=f"{_name(blame, suspect)} extended the step by {part:.1%}, but there are {known}.",
        suspect=suspect,
        runner_up=runner_up,
    )


def _name(blame: Blame, cell: Cell) -> str:
    return f"rank {blame.ranks[cell[0]]} in {PHASE_BY_CODE[cell[1]]}"
