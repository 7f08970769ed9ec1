"""Kernels by phase: a stand-in for cupti-python with its real names, arguments and rules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moetrace.errors import ConfigError
from moetrace.record.kernels import Kernel, attribute
from moetrace.record.sites import Role, Site
from moetrace_schemas.enums import Phase

Make = Callable[..., Any]


class ActivityKind(IntEnum):
    """As in CUPTI."""

    CONCURRENT_KERNEL = 10
    EXTERNAL_CORRELATION = 39


class CuptiError(Exception):
    """Stands in for cupti.cuptiError."""


class FakeCupti(ModuleType):
    """cupti.cupti 13.4: names and signatures taken from its stubs; records come at a flush."""

    ActivityKind = ActivityKind
    ExternalCorrelationKind = SimpleNamespace(CUSTOM0=2)
    cuptiError = CuptiError

    def __init__(self) -> None:
        super().__init__("cupti.cupti")
        self.enabled: set[int] = set()
        self.stack: list[int] = []
        self.records: list[Any] = []
        self.refuses = False
        self.now = 0

    def activity_register_callbacks(self, func_buffer_requested: Any, func_buffer_completed: Any) -> None:
        """Keep them."""
        size, most = func_buffer_requested()
        assert size > 0
        assert most == 0
        self.completed = func_buffer_completed

    def activity_enable(self, kind: int) -> None:
        """One client."""
        if self.refuses:
            raise CuptiError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        """No more records of a kind."""
        self.enabled.remove(kind)

    def activity_push_external_correlation_id(self, kind: int, id: int) -> None:
        """Innermost last."""
        self.stack.append(id)

    def activity_pop_external_correlation_id(self, kind: int) -> int:
        """The innermost."""
        return self.stack.pop()

    def activity_flush_all(self, flag: int) -> None:
        """Hand over everything."""
        records, self.records = self.records, []
        self.completed(records)

    def launch(self, name: str, ns: int, gap: int = 0, blocks: int = 1) -> None:
        """A kernel behind the last one."""
        correlation = len(self.records) + 1000
        if ActivityKind.EXTERNAL_CORRELATION in self.enabled and self.stack:
            self.records.append(
                SimpleNamespace(
                    kind=ActivityKind.EXTERNAL_CORRELATION,
                    correlation_id=correlation,
                    external_id=self.stack[-1],
                    external_kind=2,
                )
            )
        start = self.now + gap
        self.now = start + ns
        if ActivityKind.CONCURRENT_KERNEL in self.enabled:
            self.records.append(
                SimpleNamespace(
                    kind=ActivityKind.CONCURRENT_KERNEL,
                    name=name,
                    start=start,
                    end=self.now,
                    stream_id=7,
                    correlation_id=correlation,
                    **{f"{what}_{axis}": 1 for what in ("grid", "block") for axis in "xyz"}
                    | {"grid_x": blocks},
                )
            )


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    """The stand-in in place of the package."""
    fake = FakeCupti()
    monkeypatch.setitem(sys.modules, "cupti", ModuleType("cupti"))
    monkeypatch.setitem(sys.modules, "cupti.cupti", fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return fake


def test_kernels_belong_to_the_innermost_call_that_launched_them(record: Make, cupti: FakeCupti) -> None:
    """Busy and idle time, runs by name, and what no wrapped call launched."""
    tracer = record(kernels=True).tracer

    def experts() -> None:
        cupti.launch("gemm", 100)
        parts.shared_expert()
        cupti.launch("gemm", 100, gap=30)

    parts = tracer.wrap(layer=2, experts=experts, shared_expert=lambda: cupti.launch("small", 10))
    parts.experts()
    with tracer.kernels() as trace:
        cupti.launch("norm", 5)
        parts.experts()
        parts.experts()
    first, second = trace.report.phases
    assert (first.phase, first.layer, first.calls) == (Phase.EXPERT_GEMM, 2, 2)
    assert (first.busy_ns, first.idle_ns) == (400, 80)
    assert [(use.name, use.runs, use.total_ns) for use in first.kernels] == [("gemm", 4, 400)]
    assert (second.phase, second.busy_ns, second.idle_ns) == (Phase.SHARED_EXPERT, 20, 0)
    assert trace.report.elsewhere_ns == 5
    assert cupti.enabled == set()
    assert cupti.stack == []


def test_one_kernel_in_two_shapes_is_told_as_two(record: Make, cupti: FakeCupti) -> None:
    """A hot expert's GEMM and an idle one's bear one name: grid and block tell them apart, longest first."""
    tracer = record(kernels=True).tracer

    def experts() -> None:
        cupti.launch("gemm", 10, blocks=2)
        cupti.launch("gemm", 300, blocks=64)
        cupti.launch("gemm", 12, blocks=2)

    parts = tracer.wrap(layer=0, experts=experts)
    with tracer.kernels() as trace:
        parts.experts()
    (phase,) = trace.report.phases
    assert [(use.grid, use.block, use.runs, use.total_ns) for use in phase.kernels] == [
        ((64, 1, 1), (1, 1, 1), 1, 300),
        ((2, 1, 1), (1, 1, 1), 2, 22),
    ]


def test_a_refused_id_costs_its_call_and_not_the_model(
    record: Make, cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUPTI may fail in the middle of a stretch: the model runs on, and ids of other calls stay nested."""
    tracer = record(kernels=True).tracer
    push = cupti.activity_push_external_correlation_id

    def refuse_second(kind: int, id: int) -> None:
        if cupti.stack:
            raise CuptiError("CUPTI_ERROR_MAX_LIMIT_REACHED")
        push(kind, id)

    monkeypatch.setattr(cupti, "activity_push_external_correlation_id", refuse_second)

    def experts() -> str:
        parts.shared_expert()
        cupti.launch("gemm", 100)
        return "result"

    parts = tracer.wrap(layer=2, experts=experts, shared_expert=lambda: cupti.launch("small", 10))
    with tracer.kernels() as trace:
        assert parts.experts() == "result"
    assert tracer.guard.errors == {"ranges": 1}
    assert cupti.stack == []
    (phase,) = trace.report.phases
    assert (phase.phase, phase.busy_ns) == (Phase.EXPERT_GEMM, 110)


def test_kernels_that_overlap_are_busy_once() -> None:
    """Two streams at once: time that both cover counts once, and is not idle."""

    def kernel(start: int, end: int, stream: int) -> Kernel:
        return Kernel(
            name="k",
            start_ns=start,
            end_ns=end,
            stream=stream,
            grid=(1, 1, 1),
            block=(1, 1, 1),
            correlation=stream,
        )

    kernels = [kernel(0, 50, 1), kernel(40, 60, 2), kernel(45, 55, 3), kernel(80, 90, 4)]
    report = attribute(kernels, dict.fromkeys(range(1, 5), 1 << 20), [Site(Role.PHASE, Phase.ROUTER, 0)])
    assert (report.phases[0].busy_ns, report.phases[0].idle_ns) == (70, 20)


def test_it_steps_aside_where_a_profiler_or_another_stretch_runs(record: Make, cupti: FakeCupti) -> None:
    """One client at a time; the refusal names what to do, and leaves nothing enabled."""
    tracer = record(kernels=True).tracer
    with torch.profiler.profile(), pytest.raises(ConfigError, match="a profiler runs"), tracer.kernels():
        pass
    with tracer.kernels(), pytest.raises(ConfigError, match="another stretch is open"), tracer.kernels():
        pass
    cupti.refuses = True
    with pytest.raises(ConfigError, match=r"CUPTI refuses .*MULTIPLE_SUBSCRIBERS"), tracer.kernels():
        pass
    assert cupti.enabled == set()


def test_without_the_package_the_message_says_what_to_install(
    record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And everything else works."""
    monkeypatch.setitem(sys.modules, "cupti", None)
    recording = record(kernels=True)
    with pytest.raises(ConfigError, match=r"CUPTI cannot be loaded .*; pip install cupti-python"):
        recording.tracer.kernels()
    parts = recording.tracer.wrap(layer=0, router=lambda: recording.time.advance(5))
    with recording.tracer.step():
        parts.router()
    assert len(recording.records()) == 1


def test_it_is_refused_where_calls_were_not_wrapped_for_it(record: Make) -> None:
    """Otherwise the report would be empty and look like an idle device."""
    with pytest.raises(ConfigError, match=r"needs init\(kernels=True\)"):
        record().tracer.kernels()
