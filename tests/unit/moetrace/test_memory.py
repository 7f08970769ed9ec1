"""What a tracer holds in memory is what its README states."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable

import pytest

from moetrace.record.buffer import StepBuffer
from moetrace.record.types import ExpertRow, PhaseRow, TrafficRecord
from moetrace.timing.clock import HostClock
from moetrace_schemas.enums import CountKind, Direction, Phase

BYTES_PER_INTERVAL, BYTES_PER_NUMBER, BYTES_PER_ROW = 34, 40, 600
FIXED = 20_000
"""Of an empty buffer, whatever its size."""


def size_of(make: Callable[[], object]) -> int:
    """Bytes of Python memory that an object holds."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = make()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        assert made is not None
        return after - before
    finally:
        tracemalloc.stop()


def step(layers: int, experts: int, ranks: int) -> object:
    """What of a record grows with a model: eight phases, two kinds of counts and two exchanges a layer."""
    draw = random.Random(0).randrange
    phases = tuple(
        PhaseRow(at, Phase.ROUTER, Direction.FORWARD, 0, 0, 0, 0, draw(10**7), draw(10**5), draw(10**6), 5000)
        for at in range(layers)
        for _ in range(8)
    )
    counts = tuple(
        ExpertRow(layer=at, kind=kind, counts=tuple(draw(300, 2000) for _ in range(experts)))
        for at in range(layers)
        for kind in (CountKind.ROUTED, CountKind.RECEIVED)
    )
    traffic = tuple(
        TrafficRecord(layer=at, phase=phase, row_bytes=16, rows=tuple(draw(300, 2000) for _ in range(ranks)))
        for at in range(layers)
        for phase in (Phase.DISPATCH, Phase.COMBINE)
    )
    return phases, counts, traffic


@pytest.mark.parametrize("max_intervals", [4096, 65_536])
def test_a_buffer_grows_with_its_intervals_alone(max_intervals: int) -> None:
    """And is as large before the first step as it will ever be."""
    made: list[StepBuffer] = []
    size = size_of(lambda: made.append(StepBuffer(HostClock(), max_intervals)) or made)
    assert size <= BYTES_PER_INTERVAL * max_intervals + FIXED

    def fill() -> list[StepBuffer]:
        for at in range(max_intervals):
            made[0].add(1, at, at + 1)
        return made

    assert size_of(fill) < FIXED


@pytest.mark.parametrize(("layers", "experts", "ranks"), [(8, 32, 4), (61, 256, 32)])
def test_a_step_that_waits_is_as_large_as_stated(layers: int, experts: int, ranks: int) -> None:
    """By its numbers and rows; a type that grows (a field, a dictionary) is seen here."""
    numbers, rows = 2 * layers * (experts + ranks), 8 * layers
    assert size_of(lambda: step(layers, experts, ranks)) <= BYTES_PER_NUMBER * numbers + BYTES_PER_ROW * rows
