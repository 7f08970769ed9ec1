"""Which step to draw, and which of its ranks: pure choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moetrace_collectors.views.run_records import BarrierRow, StepRow
from moetrace_schemas.enums import Evidence

MAX_LANES = 16
"""Ranks drawn in one timeline; more are neither readable nor small."""


def worst_step(steps: Sequence[StepRow]) -> StepRow:
    """The step whose named suspect cost most; the longest one where no step has a suspect.

    Steps with clear evidence go first, warm-up steps come in only where there is nothing else.
    """
    counted = [row for row in steps if not row.warmup] or list(steps)
    clear = [row for row in counted if row.evidence is Evidence.CLEAR and row.suspect is not None]
    named = clear or [row for row in counted if row.suspect is not None]
    if named:
        return max(named, key=lambda row: (row.worth_ns, -row.step))
    return max(counted, key=lambda row: (row.step_ns, -row.step))


def lanes_to_show(
    step: StepRow, ranks: Sequence[int], barriers: Sequence[BarrierRow], *, limit: int = MAX_LANES
) -> tuple[int, ...]:
    """Ranks to draw, ascending: all of them up to `limit`.

    Beyond it: the critical rank and its runner-up, then the ranks that released the costliest
    barriers (at most three quarters of the lanes), then ranks spread evenly over the rest for comparison.
    """
    if len(ranks) <= limit:
        return tuple(ranks)
    present = set(ranks)
    chosen = [
        suspect.rank for suspect in (step.suspect, step.runner_up) if suspect and suspect.rank in present
    ]
    released: Counter[int] = Counter()
    for barrier in barriers:
        if barrier.releaser_rank in present:
            released[barrier.releaser_rank] += barrier.extension_ns
    for rank, _ in released.most_common():
        if len(chosen) >= limit * 3 // 4:
            break
        if rank not in chosen:
            chosen.append(rank)
    others = [rank for rank in ranks if rank not in chosen]
    free = limit - len(chosen)
    chosen += [others[index * len(others) // free] for index in range(free)]
    return tuple(sorted(chosen))
