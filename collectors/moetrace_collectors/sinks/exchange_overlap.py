"""How much of the exchanges' time a rank's lower streams hide (pure)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from moetrace_collectors.model import IntArray, PhaseColumns, RankStep
from moetrace_collectors.verdict.overlap import exposed_durations_of
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import PHASE_CODE, Phase

EXPOSED = "exposed"
HIDDEN = "hidden"
_EXCHANGES = (Phase.DISPATCH, Phase.COMBINE)


def exchange_time_ns(rank_steps: tuple[RankStep, ...]) -> dict[tuple[str, str], int]:
    """(phase, exposed or hidden) -> time in exchanges, waits included, summed over ranks."""
    total: defaultdict[tuple[str, str], int] = defaultdict(int)
    # Rank steps mostly share these arrays (phase_shapes): what is where is then found once.
    alike: defaultdict[tuple[int, int], list[PhaseColumns]] = defaultdict(list)
    for step in rank_steps:
        alike[id(step.phases.flags), id(step.phases.phase)].append(step.phases)
    for several in alike.values():
        exposed = exposed_durations_of(several)
        durations = np.stack([rows.duration_ns for rows in several])
        barrier = (several[0].flags & int(RowFlag.BARRIER)) != 0
        for phase in _EXCHANGES:
            here = barrier & (several[0].phase == PHASE_CODE[phase])
            shown = _sum(exposed[:, here])
            total[phase.value, EXPOSED] += shown
            total[phase.value, HIDDEN] += _sum(durations[:, here]) - shown
    return dict(total)


def _sum(by_rank: IntArray) -> int:
    # One rank's sum fits in int64, that of thousands need not.
    return sum(by_rank.sum(axis=1).tolist())
