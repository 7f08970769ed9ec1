"""From verdicts of single steps to findings. Pure.

Warm-up steps are left out. A step counts as named when its verdict has a suspect and the evidence is
clear or ambiguous; insufficient ones are counted and never named. Findings are per (rank, phase,
cause); a headline takes a (rank, phase) over all its causes, because one fault may show under two.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from moetrace_collectors.counted_steps import counted_steps
from moetrace_collectors.model import Suspect
from moetrace_collectors.views.findings import Finding, Incomparable, Place, Summary, Unjudged
from moetrace_collectors.views.headline import advise, write_headline, write_phase_times, write_remark
from moetrace_collectors.views.run_records import StepRow
from moetrace_schemas.enums import Cause, Evidence, Phase

STANDS_OUT_STEPS_SHARE = 0.1
"""A (rank, phase) stands out when this share of the counted steps or more names it with clear evidence ..."""
STANDS_OUT_WORTH_SHARE = 0.2
"""... and it holds this share or more of all worth that was named with clear evidence."""
RECURRING_STEPS_SHARE = 0.15
"""Where nothing stands out, a (rank, phase) recurs when this share of counted steps or more name it ..."""
RECURRING_STEPS = 3
"""... and this many or more, most of them without clear evidence ..."""
RECURRING_TOGETHER_SHARE = 0.4
"""... and all such are named in this share together: calm steps name one or another now and then as well."""
MISSING_STEPS_SHARE = 0.1
"""A rank that is missing from this share of counted steps or more is in the headline, if from ..."""
MISSING_STEPS = 3
"""... so many or more; and, while the run goes on, one that is missing from each of so many newest ones."""
MISSING_AT_END_STEPS = 20
"""Of a run that may be over, each of so many: ranks do not all send their last few steps before they exit."""
NO_EXCHANGE_REASON = "No exchange between ranks"
"""How the verdict engine's reason begins for a step in which no two ranks can be compared."""
NO_GROUP_REASON = "No exchange between ranks can be judged: there are some"
"""... and how it goes on where there are exchanges, but no rank says whose."""
LAYER_SHARE = 0.5
"""A layer is named where it holds this share of the worth or more (as within one step)."""

Named = Sequence[tuple[StepRow, Suspect]]


def summarise(steps: Sequence[StepRow], *, goes_on: bool = False) -> Summary:
    """All that the verdicts of a run say together.

    Args:
        steps: Of the run, or its newest.
        goes_on: Whether the run is watched while it runs: a rank missing at the end of `steps` is news.
    """
    counted = [row for row in steps if not row.warmup]
    named = [
        (row, row.suspect)
        for row in counted
        if row.suspect is not None and row.evidence is not Evidence.INSUFFICIENT
    ]
    places = _places(named, len(counted))
    outstanding = _outstanding(places, len(counted))
    recurring = () if outstanding else _recurring(places)
    incomparable = _incomparable(counted)
    evidence = Counter(row.evidence for row in counted)
    partial_steps = sum(bool(row.missing_ranks) for row in counted)
    missing = _missing(counted, MISSING_STEPS if goes_on else MISSING_AT_END_STEPS)
    unjudged = _unjudged(counted)
    judged = [row for row in counted if row.has_length]
    phase_median_ns = _phase_medians(judged)
    durations = sorted(row.step_ns for row in judged)
    return Summary(
        headline=write_headline(
            outstanding, places, evidence, len(counted), incomparable, missing=missing, unjudged=unjudged
        ),
        remark=(
            write_phase_times(phase_median_ns)
            if incomparable is not None
            else write_remark(outstanding, recurring, places)
        ),
        outstanding=outstanding,
        next_steps=advise(
            outstanding,
            recurring,
            len(counted),
            partial_steps,
            incomparable,
            missing=missing,
            unjudged=unjudged,
        ),
        counted=counted_steps([row.step for row in counted], warmup=len(steps) - len(counted)),
        evidence={member: evidence[member] for member in Evidence},
        partial_steps=partial_steps,
        step_median_ns=_median(durations),
        step_p95_ns=durations[math.ceil(0.95 * len(durations)) - 1] if durations else 0,
        extension_median_ns=_median(row.extension_ns for row in judged),
        phase_median_ns=phase_median_ns,
        findings=_findings(named, len(counted)),
    )


def _findings(named: Named, counted: int) -> tuple[Finding, ...]:
    groups: dict[tuple[int, Phase, Cause], list[tuple[StepRow, Suspect]]] = defaultdict(list)
    for row, suspect in named:
        groups[suspect.rank, suspect.phase, row.cause].append((row, suspect))
    findings = [
        Finding(
            rank=rank,
            phase=phase,
            cause=cause,
            layer=_layer(suspect for _, suspect in group),
            steps=len(group),
            clear_steps=_clear(group),
            steps_share=len(group) / counted,
            worth_total_ns=sum(suspect.worth_ns for _, suspect in group),
            worth_median_ns=_median(suspect.worth_ns for _, suspect in group),
            share_median=float(median(suspect.share for _, suspect in group)),
        )
        for (rank, phase, cause), group in groups.items()
    ]
    return tuple(sorted(findings, key=lambda item: (-item.worth_total_ns, item.rank, item.phase, item.cause)))


def _places(named: Named, counted: int) -> tuple[Place, ...]:
    """Most steps first."""
    groups: dict[tuple[int, Phase], list[tuple[StepRow, Suspect]]] = defaultdict(list)
    for row, suspect in named:
        groups[suspect.rank, suspect.phase].append((row, suspect))
    places = [
        Place(
            rank=rank,
            phase=phase,
            layer=_layer(suspect for _, suspect in group),
            steps=len(group),
            clear_steps=_clear(group),
            steps_share=len(group) / counted,
            worth_median_ns=_median(suspect.worth_ns for _, suspect in group),
            clear_worth_ns=sum(suspect.worth_ns for row, suspect in group if row.evidence is Evidence.CLEAR),
            causes=tuple(Counter(row.cause for row, _ in group).most_common()),
        )
        for (rank, phase), group in groups.items()
    ]
    return tuple(
        sorted(places, key=lambda place: (-place.steps, -place.clear_worth_ns, place.rank, place.phase))
    )


def _outstanding(places: Sequence[Place], counted: int) -> tuple[Place, ...]:
    """Costliest first."""
    all_worth = sum(place.clear_worth_ns for place in places)
    outstanding = [
        place
        for place in places
        if place.clear_steps
        and place.clear_steps >= STANDS_OUT_STEPS_SHARE * counted
        and place.clear_worth_ns >= STANDS_OUT_WORTH_SHARE * all_worth
    ]
    return tuple(sorted(outstanding, key=lambda place: -place.clear_worth_ns))


def _recurring(places: Sequence[Place]) -> tuple[Place, ...]:
    """Most steps first; nothing where they are named in too few steps together."""
    recurring = tuple(
        place
        for place in places
        if place.steps >= RECURRING_STEPS
        and place.steps_share >= RECURRING_STEPS_SHARE
        and place.clear_steps * 2 < place.steps
    )
    together = sum(place.steps_share for place in recurring)
    return recurring if together >= RECURRING_TOGETHER_SHARE else ()


def _incomparable(counted: Sequence[StepRow]) -> Incomparable | None:
    if not counted:
        return None
    if all(row.world_size == 1 for row in counted):
        return Incomparable.ONE_RANK
    # Where ranks are missing, their exchanges may only be missing with them.
    alone = all(row.reason.startswith(NO_EXCHANGE_REASON) and not row.missing_ranks for row in counted)
    if not alone:
        return None
    some = any(row.reason.startswith(NO_GROUP_REASON) for row in counted)
    return Incomparable.NO_GROUP if some else Incomparable.NO_EXCHANGE


def _missing(counted: Sequence[StepRow], newest_steps: int) -> dict[int, int]:
    """Ranks worth a word, with the steps that they are missing from."""
    steps = Counter(rank for row in counted for rank in row.missing_ranks)
    newest = sorted(counted, key=lambda row: row.step)[-newest_steps:]
    gone = set.intersection(*(set(row.missing_ranks) for row in newest)) if newest else set()
    return {
        rank: number
        for rank, number in steps.items()
        if number >= max(MISSING_STEPS, MISSING_STEPS_SHARE * len(counted))
        or (rank in gone and len(newest) > 1)
    }


def _unjudged(counted: Sequence[StepRow]) -> Unjudged | None:
    """The commonest reason of steps that were not judged or miss ranks, where it is most steps'."""
    reasons = Counter(
        row.reason for row in counted if row.suspect is None and (not row.has_length or row.missing_ranks)
    )
    for reason, steps in reasons.most_common(1):
        if reason and 2 * steps > len(counted):
            return Unjudged(reason=reason, steps=steps)
    return None


def _phase_medians(judged: Sequence[StepRow]) -> dict[Phase, int]:
    return {
        phase: _median(row.phase_ns.get(phase, 0) for row in judged)
        for phase in Phase
        if any(row.phase_ns.get(phase) for row in judged)
    }


def _clear(group: Named) -> int:
    return sum(row.evidence is Evidence.CLEAR for row, _ in group)


def _layer(suspects: Iterable[Suspect]) -> int | None:
    worth: dict[int | None, int] = defaultdict(int)
    for suspect in suspects:
        worth[suspect.layer] += suspect.worth_ns
    needed = LAYER_SHARE * sum(worth.values())
    holding = [layer for layer, part in worth.items() if layer is not None and part >= needed > 0]
    # Two layers can hold exactly half each; then no single one does.
    return holding[0] if len(holding) == 1 else None


def _median(values: Iterable[int]) -> int:
    listed = list(values)
    return round(median(listed)) if listed else 0
