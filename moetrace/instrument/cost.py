"""What one recorded interval costs the model's thread, measured once by the clock that will be used."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from moetrace.guard import Guard
from moetrace.instrument.wrap import timed
from moetrace.record.buffer import StepBuffer
from moetrace.timing.clock import Clock

CALLS = 64
ROUNDS = 5


class _Scratch:
    """A recorder of nobody's step."""

    def __init__(self, buffer: StepBuffer) -> None:
        self.buffer: StepBuffer | None = buffer
        self.guard = Guard()

    def record_failed(self, error: BaseException) -> None:
        """What fails here costs nothing later."""


def interval_cost_ns(clock: Clock, now_ns: Callable[[], int] = time.perf_counter_ns) -> float:
    """Host time of one recorded interval: a wrapped call of nothing against the plain call of it.

    ::

        median over rounds of (wrapped calls - plain calls) / number of calls, never below 0

    Some 0.3 ms in all. It records marks on a track of its own, so it must not run inside a step.
    """
    buffer = StepBuffer(clock, CALLS)
    wrapped = timed(_nothing, _Scratch(buffer), 0)
    costs = []
    for _ in range(ROUNDS):
        buffer.begin(0)
        buffer.track.reset()
        begun = now_ns()
        for _ in range(CALLS):
            _nothing()
        turned = now_ns()
        for _ in range(CALLS):
            wrapped()
        costs.append(((now_ns() - turned) - (turned - begun)) / CALLS)
    return max(0.0, median(costs))


def _nothing() -> None:
    return None
