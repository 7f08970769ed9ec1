"""How sure a verdict may be: the suspect's worth against the spread of calm steps.

Fourth stage of the verdict (pure: the history is given). A (rank, phase) stands out where its worth in this
step passes what other ranks rarely reach (a spike), or where its level over recent steps lies beyond the
error of a level, and this step shows it too (a persistent fault that hides in the noise of single steps), or
where its rows explain it. The suspect is the largest that stands out; `clear` asks in addition that it is
material, that the waits confirm it, and that no other is as large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moetrace_collectors.model import FloatArray, Suspect
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
SECOND_FAULT = 0.5
"""The same for another rank that stands out as well: then there are two culprits and not one."""
CONFIRMED = 0.5
"""Part of the suspect's worth that the waits must confirm."""
CANDIDATES = 8
"""Largest cells of a step that are looked at, by worth and by deviation."""

Cell = tuple[int, int]
"""Index into Blame.ranks, phase code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The evidence, in one sentence, and whom it names."""

    evidence: Evidence
    reason: str
    suspect: Cell | None = None
    runner_up: Suspect | None = None


def grade(
    blame: Blame,
    step_ns: int,
    history: RunHistory,
    *,
    explained: frozenset[Cell] = frozenset(),
    hidden_ns: float = 0.0,
) -> Grade:
    """Name the suspect of one step, or say why none can be named.

    Args:
        blame: extensions by rank and phase.
        step_ns: length of the frontier.
        history: past steps of the run and forward mode.
        explained: cells whose rows explain them (cause.py).
        hidden_ns: what ranks that did not report may have cost (transfer.py).
    """
    cells = _largest(blame.worth_ns.astype(np.float64))
    if not cells or step_ns <= 0:
        if all(frontier.told.all() for frontier in blame.frontiers):
            reason = "No rank did more work than another before any exchange."
        else:
            reason = "Ranks are missing, and one of them may have released every exchange."
        return Grade(evidence=Evidence.INSUFFICIENT, reason=reason)
    if len(history) < MIN_STEPS:
        return _grade_without_history(blame, cells, step_ns, len(history))
    margin = history.margin()
    bars = {cell: history.bars(int(blame.ranks[cell[0]])) for cell in cells}
    parts = {cell: float(blame.worth_ns[cell]) / step_ns for cell in cells}
    spikes = [cell for cell in cells if parts[cell] >= max(MATERIAL, margin * bars[cell][1])]
    steady = [cell for cell in _largest(blame.deviation_ns) if _is_steady(blame, cell, step_ns, history)]
    raised = [cell for cell in cells if parts[cell] >= max(MATERIAL, bars[cell][0])]
    standing_out = spikes + steady + [cell for cell in cells if cell in explained]
    if not standing_out and not raised:
        first = cells[0]
        reason = (
            f"No extension above the noise: the largest, {_name(blame, first)}, is {parts[first]:.1%} of the "
            f"step, and others reach {bars[first][0]:.1%} in calm steps."
        )
        return Grade(evidence=Evidence.INSUFFICIENT, reason=reason)
    suspect = max(standing_out or raised, key=lambda cell: blame.worth_ns[cell])
    runner_up = _runner_up(blame, suspect, cells)
    doubt = _doubt(blame, suspect, runner_up, standing_out)
    if not doubt and hidden_ns >= RIVAL * blame.worth_ns[suspect]:
        doubt = f"{_name(blame, suspect)} extended the step, but a missing rank may have done so by more."
    if doubt:
        return Grade(evidence=Evidence.AMBIGUOUS, reason=doubt, suspect=suspect, runner_up=runner_up)
    part = float(blame.worth_ns[suspect]) / step_ns
    if suspect in spikes:
        why = f"others rarely pass {bars[suspect][1]:.1%} in calm steps"
    elif suspect in steady:
        why = "it has been slower than the others there for many steps"
    else:
        why = "its rows explain it"
    return Grade(
        evidence=Evidence.CLEAR,
        reason=f"{_name(blame, suspect)} extended the step by {part:.1%}; {why}, and the waits agree.",
        suspect=suspect,
        runner_up=runner_up,
    )


def link_grade(said: str, waits: str = "") -> Grade:
    """The evidence where slow transfers outweigh every rank: the cause is told, the rank is not.

    `said` names the transfers and what they exceed (transfer.py, standing.py). `waits` is what the exchange's
    kernels say of the ends, where they do: cycles, which are worth no time, so that they name a place to look
    at and no suspect.
    """
    reason = f"The {said}, so durations cannot tell whose link is slow."
    if waits:
        reason += f" By the waits that kernels summed, {waits}."
    return Grade(evidence=Evidence.INSUFFICIENT, reason=reason)


def beside_link(graded: Grade, said: str) -> Grade:
    """The evidence where a rank stands out and slow transfers cost somewhat more: it is named with doubt."""
    return replace(graded, evidence=Evidence.AMBIGUOUS, reason=f"{graded.reason} But the {said}.")


def beside_standing(graded: Grade, said: str) -> Grade:
    """The evidence where transfers may hide a slow link: nobody is clear beside what may be far more."""
    doubtful = Evidence.AMBIGUOUS if graded.evidence is Evidence.CLEAR else graded.evidence
    reason = (
        f"{graded.reason} The {said}: a slow link since the first step, or an exchange that costs it always."
    )
    return replace(graded, evidence=doubtful, reason=reason)


def _largest(values: FloatArray) -> list[Cell]:
    """The cells with the largest positive values, descending; ties in ascending (rank, phase)."""
    flat = values.ravel()
    order = np.argsort(-flat, kind="stable")[:CANDIDATES]
    num_phases = values.shape[1]
    return [(int(i) // num_phases, int(i) % num_phases) for i in order if flat[i] > 0]


def _is_steady(blame: Blame, cell: Cell, step_ns: int, history: RunHistory) -> bool:
    """Whether a rank's level in a phase is beyond its error and this step shows it."""
    here = float(blame.deviation_ns[cell]) / step_ns
    if blame.worth_ns[cell] <= 0 or here < MATERIAL / 2:
        return False
    rank, phase = int(blame.ranks[cell[0]]), cell[1]
    for window in LEVEL_WINDOWS:
        level = history.level(rank, phase, window)
        if MATERIAL <= level <= 2 * here and level >= LEVEL_ERRORS * history.level_error(phase, window):
            return True
    return False


def _runner_up(blame: Blame, suspect: Cell, cells: list[Cell]) -> Suspect | None:
    """The second largest: of the other cells, or of the ranks in the suspect's shadow."""
    others = [blame.suspect(*cell) for cell in cells if cell != suspect][:1]
    shadow = blame.shadow_of(*suspect)
    if shadow is not None:
        others.append(shadow)
    return max(others, key=lambda other: other.worth_ns, default=None)


def _doubt(blame: Blame, suspect: Cell, runner_up: Suspect | None, standing_out: list[Cell]) -> str:
    """Why the verdict is not clear; empty if it is."""
    worth = blame.worth_ns[suspect]
    if not standing_out:
        return f"{_name(blame, suspect)} is above what other ranks usually reach, but not by enough."
    if blame.confirmed_ns[suspect] < CONFIRMED * worth:
        return f"{_name(blame, suspect)} did the most work, but no waits of other ranks confirm it."
    if runner_up is not None and runner_up.worth_ns >= RIVAL * worth:
        other = f"rank {runner_up.rank} in {runner_up.phase}"
        return f"{_name(blame, suspect)} and {other} extended the step alike."
    for cell in standing_out:
        if cell[0] != suspect[0] and blame.worth_ns[cell] >= SECOND_FAULT * worth:
            return f"{_name(blame, suspect)} and {_name(blame, cell)} both extended the step."
    return ""


def _grade_without_history(blame: Blame, cells: list[Cell], step_ns: int, steps: int) -> Grade:
    suspect = cells[0]
    runner_up = _runner_up(blame, suspect, cells)
    part = float(blame.worth_ns[suspect]) / step_ns
    known = f"only {steps} of {MIN_STEPS} earlier steps to compare with"
    confirmed = blame.confirmed_ns[suspect] >= CONFIRMED * blame.worth_ns[suspect]
    rival = runner_up is not None and runner_up.worth_ns >= RIVAL * blame.worth_ns[suspect]
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
