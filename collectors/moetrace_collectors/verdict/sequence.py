"""One expert-parallel group's step as arrays: ordered exchanges, and the local work before each.

What the first stage of the verdict (rows.py, matching.py) hands on. Nothing is judged here.

::

    rows of a rank   |outside|router|permute|<dispatch>|expert_gemm|<combine>|unpermute|
    exchanges                                    k=0                  k=1      tail
    work before it   [        w[r, 0, phase]   ]        [ w[r, 1] ]            [ w[r, 2] ]

The tail is the work after the last exchange. Nothing synchronises it, so it is a pseudo-exchange without
transfer, and what the later stages read from it is weaker evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moetrace_collectors.model import IntArray
from moetrace_schemas.enums import PHASE_BY_CODE, PHASE_CODE, Phase

BoolArray = npt.NDArray[np.bool_]

NUM_PHASES = max(PHASE_BY_CODE) + 1
"""Length of every phase axis; the index is the phase's wire code."""

EXCHANGE_CODES = (PHASE_CODE[Phase.DISPATCH], PHASE_CODE[Phase.COMBINE])
GEMM_CODE = PHASE_CODE[Phase.EXPERT_GEMM]
OUTSIDE_CODE = PHASE_CODE[Phase.OUTSIDE]

TAIL_LAYER = -1
UNKNOWN = -1
"""Rows or bytes that a rank did not tell."""

KEY_COLUMNS = ("layer", "phase", "direction", "microbatch", "ordinal")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSequence:
    """One EP group's step as arrays over ranks R, exchanges K (the tail is the last one) and phases P."""

    ep_group: int
    ep_size: int
    ranks: IntArray
    """[R], ascending: the ranks that arrived with a comparable sequence."""
    left_out_ranks: tuple[int, ...]
    """Arrived, but with so few of the group's exchanges (a truncated step) that they count as missing."""
    keys: IntArray
    """[K, 5]: layer, phase, direction, microbatch, ordinal per exchange; the tail: (-1, outside, 0, 0, 0)."""
    work_ns: IntArray
    """[R, K, P]: exposed local work since the exchange before, by phase."""
    exchange_ns: IntArray
    """[R, K]: exposed time inside the exchange, transfer plus wait; 0 for the tail."""
    sent_bytes: IntArray
    """[R, K]: payload of the exchange; -1 = unknown."""
    gemm_rows: IntArray
    """[R, K]: rows that this rank's experts worked on before the exchange; -1 = unknown."""
    work_layer: IntArray
    """[K, P]: layer of a cell's rows (an unpermute of layer 3 is work before layer 4's dispatch)."""
    unmatched: BoolArray
    """[K]: ranks disagree on the exchanges at or just before this one; its figures are doubtful."""

    @property
    def num_exchanges(self) -> int:
        """Real exchanges, without the tail."""
        return len(self.keys) - 1
