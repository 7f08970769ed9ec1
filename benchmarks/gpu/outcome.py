"""What one check or cost of the kit says."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row of the table."""

    name: str
    state: str
    """pass, fail, measured, or skipped."""
    said: str
    figures: dict[str, float] = field(default_factory=dict)


def checked(name: str, holds: bool, said: str, **figures: float) -> Outcome:
    """A check."""
    return Outcome(name=name, state="pass" if holds else "fail", said=said, figures=figures)


def measured(name: str, said: str, **figures: float) -> Outcome:
    """A figure that nothing is asked of."""
    return Outcome(name=name, state="measured", said=said, figures=figures)


def skipped(name: str, why: str) -> Outcome:
    """What cannot be asked here."""
    return Outcome(name=name, state="skipped", said=why)
