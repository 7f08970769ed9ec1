"""Whether a verdict on a simulated step is right, against what was injected and what the noise did (pure)."""

from __future__ import annotations

from enum import StrEnum

from moetrace_collectors.model import StepVerdict
from moetrace_collectors.simulate import SimulatedStep
from moetrace_schemas.enums import Evidence

HICCUP_SHARE = 0.5
"""Part of a suspect's worth that a hiccup must hold to be what the verdict names."""


class Outcome(StrEnum):
    """One verdict against the truth."""

    RIGHT = "right"
    """It names an injected rank and phase, or the link where that is what is slow."""
    UNCLEAR = "unclear"
    """It does not claim to know."""
    HICCUP = "hiccup"
    """It clearly names a rank that the noise held up, in the phase in which it did."""
    WRONG = "wrong"
    """It clearly names what is not so."""


def outcome(step: SimulatedStep, verdict: StepVerdict) -> Outcome:
    """Compare a verdict with its step."""
    suspect = verdict.suspect
    if any(
        (suspect is not None and (suspect.rank, suspect.phase) == (fault.rank, fault.named_phase))
        or (suspect is None and verdict.cause is fault.cause)
        for fault in step.truth
    ):
        return Outcome.RIGHT
    if suspect is None or verdict.evidence is not Evidence.CLEAR:
        return Outcome.UNCLEAR
    held_up = any(
        (hiccup.rank, hiccup.phase) == (suspect.rank, suspect.phase)
        and hiccup.duration_ns >= HICCUP_SHARE * suspect.worth_ns
        for hiccup in step.hiccups
    )
    return Outcome.HICCUP if held_up else Outcome.WRONG
