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
from dataclasses import dataclass

MAX_INCARNATIONS = 16
"""Runs under one id. Two jobs that use one id at the same time would make one after the other."""
MAX_RUNS = 1_024
SAME_TIME_NS = 60 * 10**9
"""Two jobs repeat each other's steps in this time; the id is one's when the other is silent for so long."""
RESTART_NS = 2 * 10**9
"""A process that is started again is silent for longer than this before its first step."""
_FEW_STEPS = 3
"""Steps between two beginnings where two jobs take turns at every step."""
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


@dataclass(slots=True, kw_only=True)
class _Life:
    """What was executed of one run under an id."""

    stored_run_id: str
    first_step: int
    rank: int
    newest_step: int
    newest_start_ns: int
    first_start_ns: int
    end_ns: int
    num_steps: int = 1
    went_back: bool = False
    """A lower step began after a higher one: two jobs take turns, one behind the other."""

    def executed(self, step: int, rank: int, start_ns: int, end_ns: int) -> None:
        self.num_steps += 1
        self.end_ns = max(self.end_ns, end_ns)
        # By one rank's clock only.
        if rank != self.rank or start_ns == self.newest_start_ns:
            return
        is_newer = start_ns > self.newest_start_ns
        self.went_back |= step < self.newest_step if is_newer else step > self.newest_step
        if is_newer:
            self.newest_step, self.newest_start_ns = step, start_ns


class Successions:
    """Tells a run that came after another one from one that came between its steps.

    What is stored as one run begins with a step that was executed again. Of a job started again it is all
    that job's, in order; of two jobs it is of both, and the next one begins with a later step::

        started again   0 1 2 | 0 1 2 3 | 0 1 2      or, from a checkpoint,   0 1 2 3 4 | 3 4 5 6 7 | 6 7 8
        two jobs        0 | 0 1 | 1 2 | 2 3          or, one steps behind,    0 1 2 | 0 3 1 4 2 5 | 3 6 4
    """

    def __init__(self) -> None:
        self._lives: OrderedDict[str, tuple[_Life | None, _Life | None]] = OrderedDict()
        """The last two under each id."""

    def executed(
        self, run_id: str, stored_run_id: str, *, step: int, rank: int, start_ns: int, end_ns: int
    ) -> None:
        """A step has closed.

        Args:
            run_id: on the wire.
            stored_run_id: of its incarnation.
            step: the step.
            rank: whose times these are.
            start_ns: unix ns.
            end_ns: unix ns.
        """
        before, newest = self._lives.get(run_id, (None, None))
        for life in (before, newest):
            if life is not None and life.stored_run_id == stored_run_id:
                life.executed(step, rank, start_ns, end_ns)
                return
        life = _Life(
            stored_run_id=stored_run_id, first_step=step, rank=rank, newest_step=step,
            newest_start_ns=start_ns, first_start_ns=start_ns, end_ns=end_ns,
        )  # fmt: skip
        self._lives[run_id] = (newest, life)
        self._lives.move_to_end(run_id)
        while len(self._lives) > MAX_RUNS:
            self._lives.popitem(last=False)

    def older_goes_on(self, run_id: str, stored_run_id: str) -> bool:
        """Whether steps of the run before still began when this one, the newest, had begun."""
        before, newest = self._lives.get(run_id, (None, None))
        if before is None or newest is None or newest.stored_run_id != stored_run_id:
            return False
        if newest.first_step <= before.first_step:
            return False
        is_at_once = newest.first_start_ns - before.end_ns < RESTART_NS
        return before.went_back or (is_at_once and before.num_steps <= _FEW_STEPS)


class ReuseWatch:
    """Tells an id that is used again from one that two jobs use at the same time.

    Those two repeat each other's steps for ever, so that one run after the other begins, and the older one
    goes on meanwhile; of a job that was started again, however soon, nothing comes any more.
    """

    def __init__(self) -> None:
        self._begun: OrderedDict[str, int] = OrderedDict()
        """When the newest run under an id began, or gave the last sign of a second job, unix ns."""
        self._told: OrderedDict[str, None] = OrderedDict()
        """Ids that two jobs have."""

    def saw(self, run_id: str, begun_unix_ns: int, *, older_goes_on: bool) -> bool:
        """A run under an id is seen that was not seen before; whether to say, once, that two jobs have it.

        Args:
            run_id: on the wire.
            begun_unix_ns: when that run began, and not when it was seen: a collector that starts in the
                middle of a run must not take the next one for a second job.
            older_goes_on: whether steps of the run before still began when that one had begun.
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
        if not older_goes_on or run_id in self._told:
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
