"""One run id, used again: which of its runs a rank step belongs to. Pure.

The second run under an id is kept apart as `<run id>:2`, the third as `<run id>:3`::

    run-7      step 0 .. 900, killed
    run-7                          step 0 again, started later than any rank's first step 0
    stored as  run-7 0..900        run-7:2 0..

A resend carries the very start time of the first sending; a step that was executed again starts later.
That is all that is compared, and only against starts of the same step or of the run's end, so clocks of
different ranks may differ by less than the time between two runs. schemas/decisions/0012 says why not more.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_INCARNATIONS = 16
"""Runs under one id. Two jobs that use one id at the same time would make one after the other."""
MAX_RUNS = 1_024
SAME_TIME_NS = 60 * 10**9
"""Two runs that begin within this time under one id are taken for two jobs."""
AGAIN_REASON = "executed_again"
TWO_JOBS_REASON = "two_jobs"
"""Reasons of the event that says it, wherever steps are joined."""
_LONGEST_BASE = 120
"""A run id has at most 128 characters, the number included."""


class Incarnations:
    """Per run id: from which start on which incarnation counts."""

    def __init__(self) -> None:
        self._cuts: OrderedDict[str, list[int]] = OrderedDict()
        """Starts of the incarnations after the first, ascending, unix ns."""

    def at(self, run_id: str, start_unix_ns: int) -> int:
        """The incarnation, from 1, that a rank step with this start belongs to if nothing else is known."""
        cuts = self._cuts.get(run_id)
        return 1 if not cuts else 1 + sum(cut <= start_unix_ns for cut in cuts)

    def begun(self, run_id: str, start_unix_ns: int) -> int:
        """When that incarnation began, unix ns; 0 for the first."""
        return max((cut for cut in self._cuts.get(run_id, ()) if cut <= start_unix_ns), default=0)

    def after(self, run_id: str, number: int, start_unix_ns: int) -> int | None:
        """The incarnation behind `number`, begun where there is none; None where there are too many.

        A rank step with this start is known not to belong to `number`.
        """
        cuts = self._cuts.get(run_id, [])
        if number <= len(cuts):
            # Begun by another rank, whose clock or first step was a little later.
            cuts[number - 1] = min(cuts[number - 1], start_unix_ns)
            return number + 1
        if number >= MAX_INCARNATIONS:
            return None
        self._cuts[run_id] = [*cuts, start_unix_ns]
        self._cuts.move_to_end(run_id)
        while len(self._cuts) > MAX_RUNS:
            self._cuts.popitem(last=False)
        return number + 1

    def dump(self) -> dict[str, list[int]]:
        """Cuts by run id."""
        return {run_id: list(cuts) for run_id, cuts in self._cuts.items()}

    def load(self, cuts: dict[str, list[int]]) -> None:
        """Take over what an earlier process knew."""
        for run_id, ones in cuts.items():
            if ones:
                self._cuts[run_id] = sorted(ones)[: MAX_INCARNATIONS - 1]


class ReuseWatch:
    """Tells an id that is used again from one that two jobs use at the same time.

    Those two repeat each other's steps for ever, so that one run after the other begins; a job that was
    started again takes longer than `SAME_TIME_NS` to come to a step that it has had.
    """

    def __init__(self) -> None:
        self._begun: OrderedDict[str, int] = OrderedDict()
        """When the newest run under an id began, or gave the last sign of a second job, unix ns."""
        self._told: OrderedDict[str, None] = OrderedDict()
        """Ids that two jobs have."""

    def saw(self, run_id: str, begun_unix_ns: int) -> bool:
        """A run under an id is seen that was not seen before; whether to say, once, that two jobs have it.

        Args:
            run_id: on the wire.
            begun_unix_ns: when that run began, and not when it was seen: a collector that starts in the
                middle of a run must not take the next one for a second job.
        """
        last = self._begun.get(run_id)
        self._begun[run_id] = begun_unix_ns if last is None else max(last, begun_unix_ns)
        self._begun.move_to_end(run_id)
        _bound(self._begun)
        if last is None or last == begun_unix_ns:
            return False
        if abs(begun_unix_ns - last) >= SAME_TIME_NS:
            if begun_unix_ns > last:
                # One of the two has been silent for long enough: this is the other, started again.
                self._told.pop(run_id, None)
            return False
        if run_id in self._told:
            return False
        self._told[run_id] = None
        _bound(self._told)
        return True

    def repeated(self, run_id: str, start_unix_ns: int) -> None:
        """A step was executed again that is there already, and no run begun for it: there were too many.

        Of an id that two jobs have, it says that both go on. A resend of the same rows says nothing.
        """
        if run_id not in self._told:
            return
        last = self._begun.get(run_id, 0)
        if start_unix_ns - last >= SAME_TIME_NS:
            del self._told[run_id]
        self._begun[run_id] = max(last, start_unix_ns)

    def is_shared(self, run_id: str, start_unix_ns: int) -> bool:
        """Whether two jobs have the id now, so that a step of it may be put together from both.

        A minute after one of them has ended, the other has it for itself.
        """
        return run_id in self._told and start_unix_ns - self._begun.get(run_id, 0) < SAME_TIME_NS


def _bound(entries: OrderedDict[str, int] | OrderedDict[str, None]) -> None:
    while len(entries) > MAX_RUNS:
        entries.popitem(last=False)


def stored_run_id(run_id: str, number: int) -> str:
    """The run id under which an incarnation is joined and stored."""
    return run_id if number == 1 else f"{run_id[:_LONGEST_BASE]}:{number}"
