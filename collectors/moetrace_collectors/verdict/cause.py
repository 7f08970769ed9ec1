"""Why the suspect was late: whether its rows explain its time, and whose rows they are.

Fifth stage of the verdict (pure: the history is given). The phase tells most causes. For the experts' work
the time of the other ranks is fitted on their rows (gemm_fit.py), and what the suspect's extra rows cost on
that line is compared with its excess::

    time |            x suspect A: on the line, so its rows explain it      -> routing or placement
         |        o
         |   o o        line of the other ranks, this step and earlier ones
         |  o      x suspect B: above the line, so its device is slow       -> device
         +------------------ rows

Rows that explain the time are `routing` where one hot expert holds most of the rank's surplus, and
`placement` where it is spread over its experts: hot experts together, or too many experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moetrace_collectors.model import IntArray, RankStep
from moetrace_collectors.verdict.attribution import Blame
from moetrace_collectors.verdict.frontier import GroupFrontier
from moetrace_collectors.verdict.gemm_fit import GemmHistory, explained_part
from moetrace_collectors.verdict.sequence import GEMM_CODE, OUTSIDE_CODE
from moetrace_schemas.enums import COUNT_KIND_CODE, PHASE_BY_CODE, PHASE_CODE, Cause, CountKind, Phase

ROWS_EXPLAIN = 0.5
"""Part of the excess that extra rows must explain."""
ROWS_EXPLAIN_ALONE = (0.7, 1.5)
"""The same for rows to be evidence by themselves; beyond the upper bound the line does not fit."""
ROWS_MATERIAL = 0.05
"""Part of the step that such a worth must reach."""
SLOW_EVERYWHERE = 0.5
"""Part of its relative excess outside that a rank must show inside MoE layers to be a slow device."""
_RECEIVED = COUNT_KIND_CODE[CountKind.RECEIVED]

_CAUSE_BY_PHASE: dict[Phase, Cause] = {
    Phase.OUTSIDE: Cause.OUTSIDE,
    Phase.SCHEDULE: Cause.OUTSIDE,
    Phase.ACCEPT: Cause.OUTSIDE,
    Phase.DISPATCH: Cause.HOST,
    Phase.COMBINE: Cause.HOST,
    Phase.ROUTER: Cause.DEVICE,
    Phase.PERMUTE: Cause.DEVICE,
    Phase.UNPERMUTE: Cause.DEVICE,
    Phase.SHARED_EXPERT: Cause.DEVICE,
    Phase.FUSED: Cause.UNKNOWN,  # routing and device time cannot be told apart inside it
}

_BESIDE_GEMM = [
    PHASE_CODE[phase] for phase in (Phase.ROUTER, Phase.PERMUTE, Phase.UNPERMUTE, Phase.SHARED_EXPERT)
]


def explained_cells(blame: Blame, step_ns: int, history: GemmHistory) -> frozenset[tuple[int, int]]:
    """Cells of experts' work that rows explain so well that no comparison with calm steps is needed.

    Where routing is skewed anew in every step, some rank is hot in all of them: that is no noise, since
    the rows say why.
    """
    worths = blame.worth_ns[:, GEMM_CODE]
    largest = np.argsort(-worths, kind="stable")[:2].tolist()
    parts = {
        index: explained_part(*blame.barriers_of(index, GEMM_CODE), history)
        for index in largest
        if worths[index] >= ROWS_MATERIAL * step_ns
    }
    low, high = ROWS_EXPLAIN_ALONE
    return frozenset(
        (index, GEMM_CODE) for index, part in parts.items() if part is not None and low <= part <= high
    )


def cause_of(
    blame: Blame, suspect: tuple[int, int], history: GemmHistory, rank_steps: Sequence[RankStep]
) -> Cause:
    """The cause of a suspect's lateness; `unknown` where rows would have to tell and are not known."""
    index, phase = suspect
    frontier, place, barriers = blame.barriers_of(index, phase)
    if phase == OUTSIDE_CODE and _slow_everywhere(frontier, place):
        return Cause.DEVICE
    if phase != GEMM_CODE:
        return _CAUSE_BY_PHASE[PHASE_BY_CODE[phase]]
    part = explained_part(frontier, place, barriers, history)
    if part is None:
        return Cause.UNKNOWN
    if part < ROWS_EXPLAIN:
        return Cause.DEVICE
    return _whose_rows(int(blame.ranks[index]), frontier, place, barriers, rank_steps)


def _slow_everywhere(frontier: GroupFrontier, place: int) -> bool:
    """Whether a rank that is slow outside the MoE layers is as slow everywhere inside them, row for row.

    ::

                    outside   router   permute   expert_gemm
        others        100       10        10         80
        rank          120       12        12         96        a fifth more everywhere: the device
    """
    sequence = frontier.sequence
    times = sequence.work_ns.sum(axis=1).astype(np.float64)
    rows = np.maximum(sequence.gemm_rows, 0).sum(axis=1).astype(np.float64)
    if (rows > 0).all():
        times[:, GEMM_CODE] *= rows.mean() / rows
    kinds = np.stack([times[:, OUTSIDE_CODE], times[:, _BESIDE_GEMM].sum(axis=1), times[:, GEMM_CODE]])
    others = np.delete(kinds, place, axis=1).mean(axis=1)
    if (others <= 0.0).any():
        return False
    outside, beside_gemm, gemm = (kinds[:, place] / others - 1.0).tolist()
    return bool(min(beside_gemm, gemm) >= SLOW_EVERYWHERE * outside)


def _whose_rows(
    rank: int, frontier: GroupFrontier, place: int, barriers: IntArray, rank_steps: Sequence[RankStep]
) -> Cause:
    """Routing or placement, from the rows that each of the rank's experts received in the layers in question.

    Over these layers: surplus = the rank's rows - mean over ranks; hot = its busiest expert's rows - mean
    over all experts. Of n experts with even rows, the busiest holds 1 / n of the surplus, so one expert is
    hot where hot / surplus is at least halfway from there to 1. Without counts there is only routing to name.
    """
    rows = frontier.sequence.gemm_rows[:, barriers]
    layers = frontier.sequence.work_layer[barriers, GEMM_CODE].tolist()
    total = dict.fromkeys(layers, 0)
    surplus = 0.0
    for layer, of_ranks in zip(layers, rows.T, strict=True):
        total[layer] += int(of_ranks.sum())
        surplus += float(of_ranks[place] - of_ranks.mean())
    own: dict[int, IntArray] = {}
    for rank_step in rank_steps:
        if rank_step.rank == rank:
            for row in rank_step.experts:
                if row.kind == _RECEIVED and row.layer in total:
                    own[row.layer] = own[row.layer] + row.counts if row.layer in own else row.counts
    if not own or surplus <= 0.0:
        return Cause.ROUTING
    hot = sum(float(c.max(initial=0)) - total[layer] / max(len(c), 1) for layer, c in own.items())
    experts = max(int((c > 0).sum()) for c in own.values())
    return Cause.ROUTING if hot >= (1.0 + 1.0 / max(experts, 1)) / 2.0 * surplus else Cause.PLACEMENT
