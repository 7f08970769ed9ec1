"""Which minutes are to be rolled up now. Pure.

A minute is due when the tables hold more of it than the roll-ups do, and nothing has come for a while; where
something always comes, when it has waited long enough::

    minute 12:00   rank steps come until 12:01:02            quiet, due at 12:01:17
    minute 12:00   another one at 12:40, from a spool        more than is rolled up: due again at 12:40:15

Rolling a minute up twice costs its reading twice and changes nothing; so this decides about cost, not truth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MINUTE_S = 60
SPAN_MINUTES = 10
"""Minutes rolled up by one statement at most; bounds its memory."""
STRETCH_MINUTES = 240
"""From the first to the last of the minutes that one query counts."""

Minute = tuple[str, int]
"""(run id, unix time of its start, s)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteCounts:
    """How much there is of a minute."""

    rank_steps: int = 0
    verdicts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteSpan:
    """Minutes of a run, one behind the other."""

    run_id: str
    first_s: int
    """Start of the first, unix time."""
    end_s: int
    """End of the last, unix time."""

    @property
    def minutes(self) -> tuple[Minute, ...]:
        """The minutes in order."""
        return tuple((self.run_id, start) for start in range(self.first_s, self.end_s, MINUTE_S))


@dataclass(slots=True, kw_only=True)
class _Waiting:
    counts: MinuteCounts
    since_s: float
    changed_s: float


class MinutePlan:
    """Minutes that wait to be rolled up."""

    def __init__(self, *, settle_s: float, longest_s: float) -> None:
        """Take the rules.

        Args:
            settle_s: a minute is due when nothing of it has come for so long.
            longest_s: it is due after so long in any case.
        """
        self._settle_s = settle_s
        self._longest_s = longest_s
        self._waiting: dict[Minute, _Waiting] = {}

    @property
    def waiting(self) -> frozenset[Minute]:
        """Minutes that are not rolled up as they are now."""
        return frozenset(self._waiting)

    def see(self, minute: Minute, *, there: MinuteCounts, rolled_up: MinuteCounts, now_s: float) -> None:
        """Compare what the tables hold of a minute with what the roll-ups do."""
        waiting = self._waiting.get(minute)
        if there == rolled_up:
            self._waiting.pop(minute, None)
        elif waiting is None:
            self._waiting[minute] = _Waiting(counts=there, since_s=now_s, changed_s=now_s)
        elif waiting.counts != there:
            waiting.counts = there
            waiting.changed_s = now_s

    def due(self, *, now_s: float, everything: bool = False) -> tuple[Minute, ...]:
        """Minutes to roll up, in order; `everything` does not wait for any to settle."""
        return tuple(
            sorted(
                minute
                for minute, waiting in self._waiting.items()
                if everything
                or now_s - waiting.changed_s >= self._settle_s
                or now_s - waiting.since_s >= self._longest_s
            )
        )

    def counts(self, minute: Minute) -> MinuteCounts:
        """What there was of a waiting minute when it was last seen."""
        return self._waiting[minute].counts

    def done(self, minute: Minute) -> None:
        """It is rolled up as it was last seen."""
        self._waiting.pop(minute, None)


def spans(minutes: Iterable[Minute], *, alone: frozenset[Minute] = frozenset()) -> tuple[MinuteSpan, ...]:
    """Minutes as spans without a gap, in order, none longer than SPAN_MINUTES.

    Args:
        minutes: of any runs, in any order.
        alone: those that make a span of their own.
    """
    found: list[MinuteSpan] = []
    for run_id, start_s in sorted(minutes):
        last = found[-1] if found else None
        if (
            last is not None
            and (last.run_id, last.end_s) == (run_id, start_s)
            and start_s - last.first_s < SPAN_MINUTES * MINUTE_S
            and alone.isdisjoint({(run_id, start_s), (run_id, last.first_s)})
        ):
            found[-1] = MinuteSpan(run_id=run_id, first_s=last.first_s, end_s=start_s + MINUTE_S)
        else:
            found.append(MinuteSpan(run_id=run_id, first_s=start_s, end_s=start_s + MINUTE_S))
    return tuple(found)


def stretches(minutes: Iterable[Minute]) -> tuple[frozenset[Minute], ...]:
    """Minutes by time, cut at long gaps and after STRETCH_MINUTES.

    One rank with a wrong date must not make a query read everything between its minute and now.
    """
    found: list[list[Minute]] = []
    for minute in sorted(minutes, key=lambda one: (one[1], one[0])):
        together = found[-1] if found else None
        if (
            together is not None
            and minute[1] - together[-1][1] <= SPAN_MINUTES * MINUTE_S
            and minute[1] - together[0][1] < STRETCH_MINUTES * MINUTE_S
        ):
            together.append(minute)
        else:
            found.append([minute])
    return tuple(frozenset(together) for together in found)
