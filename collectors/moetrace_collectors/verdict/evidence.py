"""How sure a verdict may be: the suspect's worth against the spread of calm steps.

Fourth stage of the verdict (pure: the history is given). A (rank, phase) stands out where its worth in this step passes
the bar that other ranks rarely reach (a spike), or where it has led its phase in too many recent steps for
chance (a persistent fault that hides in the noise of single steps). The suspect is the largest that stands
out; `clear` asks in addition that it is material, that the waits confirm it, and that no other is as large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrace_collectors.verdict.attribution import Blame
from moetrace_collectors.verdict.history import MIN_STEPS, RunHistory
from moetrace_schemas.enums import PHASE_BY_CODE, Evidence

MATERIAL = 0.02
"""Part of the step that a worth must reach to be clear: below it there is nothing to act on."""
MATERIAL_UNKNOWN_SPREAD = 0.04
"""The same while the spread is not known yet; such a verdict is never clear."""
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
    cells = _largest_cells(blame)
    if not cells or step_ns <= 0:
        return Grade(
            evidence=Evidence.INSUFFICIENT, reason="No rank did more work than another before any exchange."
        )
    if len(history) < MIN_STEPS:
        return _grade_without_history(blame, cells, step_ns, len(history))
    parts = {cell: blame.worth_ns[cell] / step_ns for cell in cells}
    bars = {cell: history.usual(int(blame.ranks[cell[0]]), cell[1]) for cell in cells}
    margin = history.margin()
    spikes = [cell for cell in cells if parts[cell] > bars[cell] * margin]
    steady = [cell for cell in cells if cell not in spikes and _leads(history, blame, cell, parts[cell])]
    standing_out = [cell for cell in cells if cell in spikes or cell in steady]
    raised = [cell for cell in cells if parts[cell] > bars[cell]]
    for chosen in (standing_out, raised):
        named = [cell for cell in chosen if parts[cell] >= MATERIAL]
        if named:
            suspect = named[0]
            break
    else:
        first = cells[0]
        return Grade(
            evidence=Evidence.INSUFFICIENT,
            reason=f"No extension above the noise: the largest, {_name(blame, first)}, is {parts[first]:.1%} "
            f"of the step, and others reach {bars[first]:.1%} in calm steps.",
        )
    runner_up = next((cell for cell in cells if cell != suspect), None)
    doubt = _doubt(blame, suspect, runner_up, stands_out=suspect in standing_out)
    if doubt:
        return Grade(evidence=Evidence.AMBIGUOUS, reason=doubt, suspect=suspect, runner_up=runner_up)
    how = "stands out of" if suspect in spikes else "leads in nearly every recent step above"
    reason = (
        f"{_name(blame, suspect)} extended the step by {parts[suspect]:.1%}, which {how} the "
        f"{bars[suspect]:.1%} that other ranks reach; the waits agree."
    )
    return Grade(evidence=Evidence.CLEAR, reason=reason, suspect=suspect, runner_up=runner_up)


def _largest_cells(blame: Blame) -> list[Cell]:
    """The cells with the largest worth, descending; ties in ascending (rank, phase)."""
    flat = blame.worth_ns.ravel()
    order = np.argsort(-flat, kind="stable")[:CANDIDATES]
    num_phases = blame.worth_ns.shape[1]
    return [(int(i) // num_phases, int(i) % num_phases) for i in order if flat[i] > 0]


def _leads(history: RunHistory, blame: Blame, cell: Cell, part: float) -> bool:
    lead, often = history.lead(int(blame.ranks[cell[0]]), cell[1])
    return often and lead >= MATERIAL / 2 and part >= lead / 2


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
    part = blame.worth_ns[suspect] / step_ns
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
