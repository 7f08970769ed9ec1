"""VerdictEngine: joined steps in, verdicts out; holds the bounded history that the evidence needs.

No I/O, no clock, no thread: the same steps in the same order give the same verdicts. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from moetrace_collectors.model import JoinedStep, StepVerdict
from moetrace_collectors.verdict.attribution import Blame, blame
from moetrace_collectors.verdict.cause import CAUSE_BY_PHASE
from moetrace_collectors.verdict.evidence import Grade, grade
from moetrace_collectors.verdict.frontier import (
    GroupFrontier,
    barrier_results,
    frontier_by_phase,
    group_frontier,
)
from moetrace_collectors.verdict.history import RunHistory
from moetrace_collectors.verdict.sequence import group_sequences
from moetrace_schemas.enums import Cause, Evidence, ForwardMode

MAX_HISTORIES = 32
"""(run, forward mode) pairs remembered; the least recently judged is forgotten first."""


class VerdictEngine:
    """Judges steps one by one and remembers what calm steps of each run and forward mode look like."""

    def __init__(self) -> None:
        self._histories: OrderedDict[tuple[str, ForwardMode], RunHistory] = OrderedDict()

    def judge(self, joined: JoinedStep) -> StepVerdict:
        """The verdict of one step, and its place in the history of its run and forward mode."""
        frontiers = tuple(group_frontier(s) for s in group_sequences(joined) if len(s.ranks))
        mode = joined.rank_steps[0].forward_mode if joined.rank_steps else ForwardMode.MIXED
        warmup = any(rank_step.warmup for rank_step in joined.rank_steps)
        partial = bool(joined.missing_ranks) or any(
            len(f.sequence.ranks) < f.sequence.ep_size for f in frontiers
        )
        if not frontiers:
            return self._verdict(
                joined, mode, frontiers, None, _insufficient("No rank arrived."), partial, warmup
            )
        slowest = max(frontiers, key=lambda frontier: frontier.step_ns)
        judged = tuple(f for f in frontiers if f.sequence.num_exchanges and len(f.sequence.ranks) > 1)
        if not judged:
            reason = "No exchange between ranks: without waits no rank can be told from another."
            return self._verdict(joined, mode, frontiers, None, _insufficient(reason), partial, warmup)
        blamed = blame(judged)
        history = self._history(joined, mode, int(blamed.ranks[-1]) + 1)
        if partial:
            graded = _insufficient("Ranks are missing, and one of them may have been the slowest.")
        else:
            graded = grade(blamed, slowest.step_ns, history)
        if not partial and not warmup and slowest.step_ns > 0:
            history.add(
                blamed.ranks, blamed.worth_ns / slowest.step_ns, blamed.deviation_ns / slowest.step_ns
            )
        return self._verdict(joined, mode, frontiers, blamed, graded, partial, warmup)

    def _history(self, joined: JoinedStep, mode: ForwardMode, least: int) -> RunHistory:
        key = (joined.run_id, mode)
        num_ranks = max(joined.world_size, least)
        history = self._histories.get(key)
        if history is None or history.num_ranks < num_ranks:
            history = self._histories[key] = RunHistory(num_ranks)
        self._histories.move_to_end(key)
        while len(self._histories) > MAX_HISTORIES:
            self._histories.popitem(last=False)
        return history

    def _verdict(
        self,
        joined: JoinedStep,
        mode: ForwardMode,
        frontiers: tuple[GroupFrontier, ...],
        blamed: Blame | None,
        graded: Grade,
        partial: bool,
        warmup: bool,
    ) -> StepVerdict:
        slowest = max(frontiers, key=lambda frontier: frontier.step_ns, default=None)
        suspect = blamed.suspect(*graded.suspect) if blamed and graded.suspect else None
        runner_up = blamed.suspect(*graded.runner_up) if blamed and graded.runner_up else None
        return StepVerdict(
            run_id=joined.run_id,
            step=joined.step,
            forward_mode=mode,
            evidence=graded.evidence,
            reason=graded.reason,
            suspect=suspect,
            cause=CAUSE_BY_PHASE[suspect.phase] if suspect else Cause.UNKNOWN,
            runner_up=runner_up,
            step_ns=slowest.step_ns if slowest else 0,
            extension_ns=int(slowest.extension_ns.sum()) if slowest else 0,
            phase_ns=frontier_by_phase(slowest) if slowest else {},
            missing_ranks=joined.missing_ranks,
            partial=partial,
            warmup=warmup,
            barriers=tuple(result for frontier in frontiers for result in barrier_results(frontier)),
        )


def _insufficient(reason: str) -> Grade:
    return Grade(evidence=Evidence.INSUFFICIENT, reason=reason)
