"""VerdictEngine: joined steps in, verdicts out; holds the bounded history that the evidence needs.

No I/O, no clock, no thread: the same steps in the same order give the same verdicts. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from moetrace_collectors.model import JoinedStep, StepVerdict, Suspect
from moetrace_collectors.verdict.attribution import blame
from moetrace_collectors.verdict.cause import cause_of, explained_cells
from moetrace_collectors.verdict.evidence import (
    MATERIAL,
    Grade,
    beside_link,
    beside_standing,
    grade,
    link_grade,
)
from moetrace_collectors.verdict.frontier import (
    GroupFrontier,
    barrier_results,
    frontier_by_phase,
    group_frontier,
)
from moetrace_collectors.verdict.matching import group_sequences
from moetrace_collectors.verdict.memory import RunMemory
from moetrace_collectors.verdict.standing import StandingExcess, standing_excesses
from moetrace_collectors.verdict.transfer import LinkExcess
from moetrace_collectors.verdict.wait_matrix import slow_ends
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Cause, Evidence, ForwardMode

MAX_RUNS = 32
"""(run, forward mode) pairs remembered; the least recently judged is forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """What was decided about a step, beside its figures."""

    graded: Grade
    suspect: Suspect | None = None
    runner_up: Suspect | None = None
    cause: Cause = Cause.UNKNOWN


class VerdictEngine:
    """Judges steps one by one and remembers what calm steps of each run and forward mode look like.

    Warm-up steps and steps with missing ranks are judged, but stay out of that memory.
    """

    def __init__(self) -> None:
        self._memories: OrderedDict[tuple[str, ForwardMode], RunMemory] = OrderedDict()

    def judge(self, joined: JoinedStep) -> StepVerdict:
        """The verdict of one step; the step then joins the memory of its run and forward mode."""
        sequences = group_sequences(joined) if joined.rank_steps else ()
        frontiers = tuple(group_frontier(sequence) for sequence in sequences)
        mode = _forward_mode(joined)
        warmup = any(rank_step.warmup for rank_step in joined.rank_steps)
        partial = bool(joined.missing_ranks) or not all(_complete(f) for f in frontiers)
        judged = [f for f in frontiers if f.sequence.num_exchanges and len(f.sequence.ranks) > 1]
        slowest = max(frontiers, key=lambda frontier: frontier.step_ns, default=None)
        if slowest is None or not judged:
            finding = _Finding(
                graded=Grade(evidence=Evidence.INSUFFICIENT, reason=_nothing_to_compare(joined))
            )
        else:
            memory = self._memory(joined, mode)
            finding, judged = _find(joined, judged, slowest.step_ns, memory, keep=not warmup)
            by_group = {frontier.sequence.ep_group: frontier for frontier in judged}
            frontiers = tuple(by_group.get(f.sequence.ep_group, f) for f in frontiers)
        return StepVerdict(
            run_id=joined.run_id,
            step=joined.step,
            forward_mode=mode,
            evidence=finding.graded.evidence,
            reason=finding.graded.reason,
            suspect=finding.suspect,
            cause=finding.cause,
            runner_up=finding.runner_up,
            step_ns=slowest.step_ns if slowest else 0,
            extension_ns=int(slowest.extension_ns.sum()) if slowest else 0,
            phase_ns=frontier_by_phase(slowest) if slowest else {},
            missing_ranks=joined.missing_ranks,
            partial=partial,
            warmup=warmup,
            barriers=tuple(result for frontier in frontiers for result in barrier_results(frontier)),
        )

    def _memory(self, joined: JoinedStep, mode: ForwardMode) -> RunMemory:
        key = (joined.run_id, mode)
        memory = self._memories.setdefault(key, RunMemory())
        self._memories.move_to_end(key)
        while len(self._memories) > MAX_RUNS:
            self._memories.popitem(last=False)
        return memory


def _find(
    joined: JoinedStep, frontiers: list[GroupFrontier], step_ns: int, memory: RunMemory, *, keep: bool
) -> tuple[_Finding, list[GroupFrontier]]:
    """Decide about one step. Returns the frontiers as well, marked where missing ranks leave them open."""
    hidden_ns = 0.0
    for index, frontier in enumerate(frontiers):
        if not _complete(frontier):
            told, hidden = memory.transfers.told(frontier)
            frontiers[index] = replace(frontier, told=told)
            hidden_ns = max(hidden_ns, hidden)
    complete = [frontier for frontier in frontiers if _complete(frontier)]
    blamed = blame(frontiers)
    explained = explained_cells(blamed, step_ns, memory.gemms)
    graded = grade(blamed, step_ns, memory.worths, explained=explained, hidden_ns=hidden_ns)
    suspect = blamed.suspect(*graded.suspect) if graded.suspect else None
    runner_up = graded.runner_up
    cause = (
        cause_of(blamed, graded.suspect, memory.gemms, joined.rank_steps) if graded.suspect else Cause.UNKNOWN
    )
    if keep:
        standing = _standing(joined, complete, memory, step_ns)
        links = [e for f in complete for e in memory.transfers.observe(f, MATERIAL * step_ns)]
        slow: list[LinkExcess | StandingExcess] = [*links, *(e for e in standing if e.tells_link)]
        link = max(slow, key=lambda excess: excess.excess_ns, default=None)
        maybe = max((e for e in standing if not e.tells_link), key=lambda e: e.excess_ns, default=None)
        if link is not None and link.excess_ns > _outweighs(suspect, cause, graded.evidence):
            waits = slow_ends(joined.rank_steps, link.ep_group, link.phase)
            graded, cause = link_grade(link.sentence(step_ns), waits), Cause.LINK
            suspect, runner_up = None, suspect
        elif link is not None and suspect is not None and link.excess_ns > _outweighs(suspect, cause):
            graded = beside_link(graded, link.sentence(step_ns))
        elif maybe is not None and maybe.excess_ns > _outweighs(suspect, cause, graded.evidence):
            graded = beside_standing(graded, maybe.sentence(step_ns))
        for frontier in complete:
            memory.gemms.add(frontier)
        if len(complete) == len(frontiers) and not joined.missing_ranks and step_ns > 0:
            memory.worths.add(blamed.ranks, blamed.worth_ns / step_ns, blamed.deviation_ns / step_ns)
    return _Finding(graded=graded, suspect=suspect, runner_up=runner_up, cause=cause), frontiers


def _standing(
    joined: JoinedStep, complete: list[GroupFrontier], memory: RunMemory, step_ns: int
) -> list[StandingExcess]:
    """Transfers that are long against their peers in this step and usually."""
    hosts: dict[int, set[str]] = {}
    for one in joined.rank_steps:
        hosts.setdefault(one.ep_group, set()).add(one.host_name)
    num_hosts = {group: len(names) for group, names in hosts.items()}
    material_ns = MATERIAL * step_ns
    return [e for f in complete for e in standing_excesses(f, memory.transfers, num_hosts, material_ns)]


def _outweighs(suspect: Suspect | None, cause: Cause, evidence: Evidence | None = None) -> float:
    """The excess of transfers up to which a suspect remains what extended the step most, ns."""
    if suspect is None:
        return 0.0
    # Rows that make one rank's experts slow make its exchanges long as well: one cause, not two. And a
    # rank that stands out clearly is what can be acted on, even where a transfer was somewhat longer.
    named = cause in (Cause.ROUTING, Cause.PLACEMENT) or evidence is Evidence.CLEAR
    return suspect.worth_ns * (2.0 if named else 1.0)


def _nothing_to_compare(joined: JoinedStep) -> str:
    """Why no rank of this step can be told from another."""
    if joined.missing_ranks:
        missing = ", ".join(map(str, joined.missing_ranks[:8])) + (
            ", ..." if joined.missing_ranks[8:] else ""
        )
        return f"Missing ranks ({missing}) leave no group with two ranks whose waits could be compared."
    if joined.world_size == 1:
        return "One rank only: there is no other to compare it with."
    if any(one.ep_size == 1 and (one.phases.flags & RowFlag.BARRIER).any() for one in joined.rank_steps):
        return (
            "No exchange between ranks can be judged: there are some, and ranks say that they have no expert-"
            "parallel group; pass ep_rank=, ep_size= and ep_group= to moetrace.init."
        )
    return "No exchange between ranks: without waits no rank can be told from another."


def _complete(frontier: GroupFrontier) -> bool:
    return len(frontier.sequence.ranks) >= frontier.sequence.ep_size


def _forward_mode(joined: JoinedStep) -> ForwardMode:
    modes = {rank_step.forward_mode for rank_step in joined.rank_steps}
    return modes.pop() if len(modes) == 1 else ForwardMode.MIXED
