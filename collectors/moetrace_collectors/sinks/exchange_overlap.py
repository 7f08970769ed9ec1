"""How much of the exchanges' time a rank's lower streams hide (pure)."""

from __future__ import annotations

from collections import defaultdict

from moetrace_collectors.model import RankStep
from moetrace_collectors.verdict.overlap import exposed_durations
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import PHASE_CODE, Phase

EXPOSED = "exposed"
HIDDEN = "hidden"
_EXCHANGES = (Phase.DISPATCH, Phase.COMBINE)


def exchange_time_ns(rank_steps: tuple[RankStep, ...]) -> dict[tuple[str, str], int]:
    """(phase, exposed or hidden) -> time in exchanges, waits included, summed over ranks."""
    total: defaultdict[tuple[str, str], int] = defaultdict(int)
    for step in rank_steps:
        rows = step.phases
        exposed = exposed_durations(rows)
        barrier = (rows.flags & int(RowFlag.BARRIER)) != 0
        for phase in _EXCHANGES:
            here = barrier & (rows.phase == PHASE_CODE[phase])
            shown = int(exposed[here].sum())
            total[phase.value, EXPOSED] += shown
            total[phase.value, HIDDEN] += int(rows.duration_ns[here].sum()) - shown
    return dict(total)
