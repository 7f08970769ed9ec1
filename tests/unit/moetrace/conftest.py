"""Fixtures for the library's unit tests: a tracer on a fake clock, and nothing left running behind a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import moetrace
from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.record.types import StepRecord
from moetrace.testing import FakeTime, MemoryEmitter
from moetrace.timing.clock import Clock, HostClock
from moetrace.tracer import Tracer


@dataclass
class Recording:
    """A tracer on a fake clock, and what it emits."""

    tracer: Tracer
    time: FakeTime
    emitter: MemoryEmitter

    def records(self) -> list[StepRecord]:
        """Everything that was recorded; stops the tracer."""
        self.tracer.shutdown()
        return self.emitter.records


@pytest.fixture(autouse=True)
def _one_thread_and_no_tracer_left() -> Iterator[None]:
    import torch

    torch.set_num_threads(1)
    yield
    moetrace.shutdown(timeout_s=2)


@pytest.fixture
def record() -> Iterator[Callable[..., Recording]]:
    """Makes tracers: `record(sample="1/2", ...)` takes fields of Config; all are shut down afterwards."""
    made: list[Recording] = []

    def make(*, clock: Clock | None = None, rank: int = 0, world_size: int = 1, **settings: Any) -> Recording:
        settings = {"run_id": "test-run", "endpoint": "", **settings}
        time, emitter = FakeTime(), MemoryEmitter()
        context = RankContext(
            run_id=settings["run_id"],
            rank=rank,
            world_size=world_size,
            ep_rank=0,
            ep_size=1,
            ep_group=rank,
            host_name="host",
        )
        tracer = Tracer(Config.load(settings, {}), context, [emitter], clock or HostClock(time.now_ns))
        made.append(Recording(tracer, time, emitter))
        return made[-1]

    yield make
    for recording in made:
        recording.tracer.shutdown(timeout_s=2)
