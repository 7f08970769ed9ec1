"""NVTX ranges: balanced, named by phase and layer, and absent with a reason where torch has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moetrace.adapters.reference import ReferenceMoE

Make = Callable[..., Any]


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was pushed, and `-` for every pop."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("-"))
    return seen


def test_every_wrapped_call_is_a_range(record: Make, ranges: list[str]) -> None:
    """Nested as the calls are, in every step, and gone after uninstrument; a copy holds none."""
    recording = record(nvtx=True, sample="0")
    layer = ReferenceMoE(8, 16, num_experts=4, top_k=2)
    recording.tracer.instrument(layer)
    ranges.clear()
    layer(torch.randn(3, 8))
    assert ranges[:3] == ["moe.layer forward layer 0", "moe.router layer 0", "-"]
    assert "moe.expert_gemm layer 0" in ranges
    assert ranges.count("-") * 2 == len(ranges)
    ranges.clear()
    copy.deepcopy(layer)(torch.randn(3, 8))
    recording.tracer.uninstrument(layer)
    layer(torch.randn(3, 8))
    assert ranges == []


def test_a_call_that_fails_closes_its_range(record: Make, ranges: list[str]) -> None:
    """The model's exception passes, and what follows is not nested in a range that never ends."""
    recording = record(nvtx=True)

    def broken() -> None:
        raise ValueError("no")

    parts = recording.tracer.wrap(router=broken, layer=3)
    ranges.clear()
    with pytest.raises(ValueError, match="no"):
        parts.router()
    assert ranges == ["moe.router layer 3", "-"]


@pytest.mark.parametrize("which", ["range_push", "range_pop"])
def test_a_profiler_that_fails_costs_ranges_alone(
    record: Make, ranges: list[str], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Nothing of it reaches the model; it is counted, the step recorded, and what did not begin not ended."""
    recording = record(nvtx=True)
    recording.tracer.wrap(router=int, layer=0)  # ranges could be had then
    ranges.clear()

    def refuse(*_: object) -> None:
        raise RuntimeError("the library was unloaded")

    placing = recording.tracer._installer.placing
    assert isinstance(placing.nvtx, tuple)
    monkeypatch.setattr(torch.cuda.nvtx, which, refuse)
    placing.nvtx = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    parts = recording.tracer.wrap(router=lambda: 7, layer=1)
    with recording.tracer.step():
        assert parts.router() == 7
    assert recording.tracer.guard.errors == {"ranges": 1}
    assert ranges == ([] if which == "range_push" else ["moe.router layer 1"])
    (step,) = recording.records()
    assert len(step.seen_sites) == 1


def test_where_torch_has_no_nvtx_the_report_says_so(record: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for and not to be had: one line, and everything else works."""

    def refuse(label: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", refuse)
    recording = record(nvtx=True)
    layer: nn.Module = ReferenceMoE(8, 16, num_experts=4, top_k=2)
    report = recording.tracer.instrument(layer)
    assert ("nvtx ranges", "not to be had here: NVTX functions not installed") in report.skipped
    with recording.tracer.step():
        layer(torch.randn(3, 8))
    assert len(recording.records()) == 1
