"""Minutes that could not be rolled up, and when each is tried again. Pure.

::

    12:00 .. 12:09 fail together   each is tried alone at once: 12:03 fails, the others are done
    12:03                          again after 10 s, 20 s, .. 10 min; the minutes beside it do not wait for it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moetrace_collectors.roll_ups.minutes import Minute

FIRST_DELAY_S = 10.0
LONGEST_DELAY_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    delay_s: float
    again_s: float


class FailedMinutes:
    """What failed, by minute."""

    def __init__(self) -> None:
        self._failures: dict[Minute, _Failure] = {}

    @property
    def minutes(self) -> frozenset[Minute]:
        """All that failed when they were tried last; they are tried alone."""
        return frozenset(self._failures)

    def held_back(self, now_s: float) -> frozenset[Minute]:
        """Those whose time to be tried again has not come."""
        return frozenset(minute for minute, failure in self._failures.items() if now_s < failure.again_s)

    def failed(self, minute: Minute, now_s: float) -> None:
        """It failed, alone."""
        before = self._failures.get(minute)
        delay_s = FIRST_DELAY_S if before is None else min(2 * before.delay_s, LONGEST_DELAY_S)
        self._failures[minute] = _Failure(delay_s=delay_s, again_s=now_s + delay_s)

    def done(self, minutes: Iterable[Minute]) -> None:
        """They are rolled up, or there is nothing more to roll up."""
        for minute in minutes:
            self._failures.pop(minute, None)
