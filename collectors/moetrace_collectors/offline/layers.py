"""The order of phases inside a MoE layer: which exchange is which, and where one layer ends. Pure.

A layer passes through its phases in one order::

    router 0   permute 1   dispatch 2   expert_gemm 3   combine 4   unpermute 5

so a phase before the experts that comes after the experts begins the next layer. Annotated layer
numbers, where there are any, are kept as they are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moetrace_collectors.model import IntArray
from moetrace_schemas.enums import DIRECTION_CODE, PHASE_CODE, Direction, Phase

BoolArray = npt.NDArray[np.bool_]

OTHER = -1
_ROUTER, _PERMUTE = PHASE_CODE[Phase.ROUTER], PHASE_CODE[Phase.PERMUTE]
_DISPATCH, _COMBINE = PHASE_CODE[Phase.DISPATCH], PHASE_CODE[Phase.COMBINE]
_GEMM, _UNPERMUTE = PHASE_CODE[Phase.EXPERT_GEMM], PHASE_CODE[Phase.UNPERMUTE]
_FUSED = PHASE_CODE[Phase.FUSED]
_BACKWARD = DIRECTION_CODE[Direction.BACKWARD]

_BEFORE_EXPERTS = frozenset({_ROUTER, _PERMUTE, _DISPATCH})
_AFTER_EXPERTS = frozenset({_GEMM, _COMBINE, _UNPERMUTE, _FUSED})


def settle_exchanges(start_ns: IntArray, phase: IntArray, open_exchange: BoolArray) -> IntArray:
    """Give exchanges of unknown direction the phase that their place in a layer tells.

    ::

        expert_gemm  <x>  unpermute  attention  router  permute  <x>  expert_gemm
                   combine                                     dispatch

    Between two expert GEMMs without a router or permute of a known name, the first exchange is the
    combine of the one layer and the last the dispatch of the next. One alone cannot be told and stays
    plain communication, as does everything that is not next to experts.
    """
    settled = phase.copy()
    rows = np.flatnonzero((phase != OTHER) | open_exchange)
    if not open_exchange.any() or not (phase == _GEMM).any():
        return settled
    order = rows[np.argsort(start_ns[rows], kind="stable")].tolist()
    previous = -1
    pending: list[int] = []
    for row in [*order, -1]:
        if row >= 0 and open_exchange[row]:
            pending.append(row)
            continue
        following = int(phase[row]) if row >= 0 else -1
        for exchange, found in zip(pending, _between(previous, following, len(pending)), strict=True):
            if found != OTHER:  # one inside an annotated layer stays a part of it that cannot be told apart
                settled[exchange] = found
        pending = []
        previous = following
    return settled


def _between(previous: int, following: int, count: int) -> list[int]:
    """Phases of `count` exchanges in a row between two known phases."""
    found = [OTHER] * count
    if not count:
        return found
    # In a backward pass the same order runs from the other end, and both rules hold as they are: what
    # comes before experts hands rows out, what comes after them hands rows back.
    after_experts = previous in (_GEMM, _FUSED)
    before_experts = following in (_GEMM, _FUSED) or (
        following == _PERMUTE and previous in (_ROUTER, _PERMUTE)
    )
    if after_experts and before_experts:
        if count >= 2:
            found[0], found[-1] = _COMBINE, _DISPATCH
    elif after_experts or (previous == _UNPERMUTE and following == _UNPERMUTE):
        found[0] = _COMBINE
    elif before_experts:
        found[-1] = _DISPATCH
    return found


def number_layers(
    start_ns: IntArray, *, phase: IntArray, layer: IntArray, step: IntArray, direction: IntArray
) -> IntArray:
    """Layer of every MoE row: as annotated, else how many layers came before it in its step and direction."""
    numbered = layer.copy()
    rows = np.flatnonzero((phase != OTHER) & (layer < 0))
    order = rows[np.argsort(start_ns[rows], kind="stable")].tolist()
    current: dict[tuple[int, int], int] = {}
    seen_experts: dict[tuple[int, int], bool] = {}
    for row in order:
        key = (int(step[row]), int(direction[row] == _BACKWARD))
        code = int(phase[row])
        if key not in current:
            current[key], seen_experts[key] = 0, False
        elif code in _BEFORE_EXPERTS and seen_experts[key]:
            current[key] += 1
            seen_experts[key] = False
        if code in _AFTER_EXPERTS:
            seen_experts[key] = True
        numbered[row] = current[key]
    return numbered
