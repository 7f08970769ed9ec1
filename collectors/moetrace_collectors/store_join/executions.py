"""Steps that were executed more than once under one run id: by a run started again, or by two jobs. Pure.

In the store a later execution replaces rows of an earlier one, so a step that has two may be put together
from both. `rank_step_arrivals` keeps when each began. On one rank, a run that was started again has all its
earlier executions before the later ones; two jobs at the same time take turns::

    started again   1 2 3 4 5 . . . 3 4 5 6 7            one moment lies between both executions of 3, 4 and 5
    two jobs        1 1 2 2 3 3 4 4                      each pair needs a moment of its own

As many moments as are needed, so many runs have begun; two of them within a minute are two jobs, as where a
collector joins (`incarnations`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from moetrace_collectors.incarnations import AGAIN_REASON, SAME_TIME_NS, TWO_JOBS_REASON, ReuseWatch

MAX_BEGUN = 64
"""Beginnings of runs that are remembered of a rank: as many as two jobs make in a minute of steps."""
MAX_RUNS = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedAgain:
    """A step that one rank executed more than once."""

    run_id: str
    step: int
    rank: int
    microbatch: int
    starts: tuple[int, ...]
    """Of its executions on that rank, unix ns by its own clock, ascending."""
    stored_ms: int
    """When the newest of its rows was stored, by the store's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseNotice:
    """What is to be said of a run id."""

    run_id: str
    step: int
    rank: int
    reason: str
    """AGAIN_REASON or TWO_JOBS_REASON."""
    since_ms: int
    """Not to be said where it was said after this time, by the store's clock."""

    @property
    def text(self) -> str:
        """One line."""
        if self.reason == TWO_JOBS_REASON:
            return (
                f"two jobs seem to send under run id {self.run_id} at the same time, or one that is started "
                "again within a minute: rows of one replace those of the other, and nobody is named until a "
                "minute has passed without it; give each an id of its own"
            )
        return (
            f"run id {self.run_id} is used again (rank {self.rank} executed step {self.step} again): its "
            "rows replace those of the run before, and steps that have a verdict keep it; give each run an "
            "id of its own"
        )


def executed_again(run_id: str, row: Mapping[str, Any], *, stored_ms: int) -> ExecutedAgain:
    """A row of queries.EXECUTED_AGAIN."""
    return ExecutedAgain(
        run_id=run_id,
        step=int(row["step"]),
        rank=int(row["rank"]),
        microbatch=int(row["microbatch"]),
        starts=tuple(map(int, row["starts"])),
        stored_ms=stored_ms,
    )


@dataclass(slots=True)
class _Begun:
    """A run that began on a rank: after `after_ns`, and at `at_ns` at the latest."""

    after_ns: int
    at_ns: int


class ExecutionWatch:
    """Remembers when runs began under each id; not thread-safe."""

    def __init__(self) -> None:
        self._begun: OrderedDict[str, dict[tuple[int, int], list[_Begun]]] = OrderedDict()
        """By run and (rank, microbatch), ascending."""
        self._reuse = ReuseWatch()
        self._said_ns: dict[tuple[str, str], int] = {}

    def saw(self, again: ExecutedAgain) -> ReuseNotice | None:
        """What to say now; of several steps, those come first that were executed again first."""
        slots = self._begun.setdefault(again.run_id, {})
        self._begun.move_to_end(again.run_id)
        if len(self._begun) > MAX_RUNS:
            gone, _ = self._begun.popitem(last=False)
            self._said_ns = {key: said for key, said in self._said_ns.items() if key[0] != gone}
        slot = (again.rank, again.microbatch)
        known = slots.setdefault(slot, [])
        notice = None
        for earlier_ns, later_ns in pairwise(again.starts):
            if _place(known, earlier_ns, later_ns):
                reason = (
                    TWO_JOBS_REASON if self._reuse.saw(_name(again.run_id, *slot), later_ns) else AGAIN_REASON
                )
                notice = self._notice(again, reason, later_ns) or notice
        return notice

    def is_shared(self, run_id: str, start_unix_ns: int) -> bool:
        """Whether two jobs have the id, so that a step which began then may be of both."""
        return any(
            self._reuse.is_shared(_name(run_id, *slot), start_unix_ns) for slot in self._begun.get(run_id, ())
        )

    def _notice(self, again: ExecutedAgain, reason: str, begun_ns: int) -> ReuseNotice | None:
        # Ranks begin one after the other, and two jobs all the time.
        for key in ((again.run_id, reason), (again.run_id, TWO_JOBS_REASON)):
            said_ns = self._said_ns.get(key)
            if said_ns is not None and abs(begun_ns - said_ns) < SAME_TIME_NS:
                self._said_ns[key] = max(begun_ns, said_ns)
                return None
        self._said_ns[again.run_id, reason] = begun_ns
        return ReuseNotice(
            run_id=again.run_id,
            step=again.step,
            rank=again.rank,
            reason=reason,
            since_ms=again.stored_ms,
        )


def _name(run_id: str, rank: int, microbatch: int) -> str:
    return f"{rank}.{microbatch}.{run_id}"


def _place(known: list[_Begun], earlier_ns: int, later_ns: int) -> bool:
    """Put a beginning between two executions where there is none; whether it is a further one."""
    for begun in known:
        if earlier_ns < begun.at_ns <= later_ns:
            begun.after_ns = max(begun.after_ns, earlier_ns)
            return False
        if begun.after_ns < later_ns <= begun.at_ns:
            # The same beginning, seen at an earlier step of the later run.
            begun.at_ns, begun.after_ns = later_ns, max(begun.after_ns, earlier_ns)
            return False
    if len(known) == MAX_BEGUN and later_ns < known[0].at_ns:
        return False
    known.append(_Begun(after_ns=earlier_ns, at_ns=later_ns))
    known.sort(key=lambda begun: begun.at_ns)
    del known[:-MAX_BEGUN]
    return True
