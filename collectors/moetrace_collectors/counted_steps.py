"""Which steps a figure was made of, in one short line: the same words wherever figures over steps are shown.

Every view counts joined steps outside of warm-up, and says so with this::

    steps 3 to 40: 38 recorded of 38, warm-up left out
    steps 100 to 990: 45 decode steps recorded of 891, warm-up left out

Pure; it reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedSteps:
    """The steps of one figure, or of a whole view."""

    first: int
    """Meaningless where `counted` is 0."""
    last: int
    counted: int
    kind: str = ""
    """Forward mode, where only its steps count: others lie between them."""
    warmup: int | None = None
    """How many warm-up steps were left out; None where that was not counted."""
    warmup_told: bool = True
    """Whether the source tells warm-up steps from others at all."""

    def sentence(self) -> str:
        """Without an end, so that it can stand in a list or a line of its own."""
        left_out = self._left_out()
        if not self.counted:
            return f"no {self.kind + ' ' if self.kind else ''}step, {left_out}"
        span = self.last - self.first + 1
        where = f"steps {self.first} to {self.last}" if span > 1 else f"step {self.first}"
        kind = f" {self.kind} {'step' if self.counted == 1 else 'steps'}" if self.kind else ""
        return f"{where}: {self.counted:,}{kind} recorded of {span:,}, {left_out}"

    def _left_out(self) -> str:
        if not self.warmup_told:
            return "warm-up is not told apart"
        return "warm-up left out" if self.warmup is None else f"{self.warmup:,} of warm-up left out"


def counted_steps(steps: Sequence[int], *, kind: str = "", warmup: int | None = None) -> CountedSteps:
    """Of step numbers in any order, those of warm-up already left out."""
    return CountedSteps(
        first=min(steps, default=0),
        last=max(steps, default=0),
        counted=len(steps),
        kind=kind,
        warmup=warmup,
    )
