"""Triton's autotuner, as a stand-in with its names: a step in which it tuned is a warm-up.

The real one is run in tests/frameworks/test_triton.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from moetrace.adapters.reference import ReferenceMoE
from moetrace.instrument.step_kind import TUNER

from .conftest import Recording

Make = Callable[..., Recording]


class Autotuner:
    """triton.runtime.autotuner.Autotuner, as far as tuning goes."""

    def __init__(self) -> None:
        self.cache: dict[int, str] = {}
        self.configs = ["small", "large"]

    def prune_configs(self, kwargs: dict[str, Any]) -> list[str]:
        """Configurations to try."""
        return self.configs

    def run(self, size: int) -> str:
        """Try them all, the first time that a size comes."""
        if size not in self.cache:
            self.cache[size] = self.prune_configs({})[-1]
        return self.cache[size]


class Model(nn.Module):
    """A layer, and a kernel that is tuned by the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ReferenceMoE(8, 16, num_experts=4, top_k=2)
        self.kernel = [Autotuner()]
        self.before: Callable[[], object] = int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        self.before()
        assert self.kernel[0].run(len(hidden)) == "large"
        result: torch.Tensor = self.layer(hidden)
        return result


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, not imported yet."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    module = ModuleType(TUNER)
    module.Autotuner = Autotuner  # type: ignore[attr-defined]
    return module


def test_a_step_that_tunes_a_kernel_is_a_warm_up(
    record: Make, monkeypatch: pytest.MonkeyPatch, triton: ModuleType
) -> None:
    """Each new shape is; what was tuned before is the model's own time. Nothing stays wrapped."""
    monkeypatch.setitem(sys.modules, TUNER, triton)
    recording, model, plain = record(buffers=8), Model(), Autotuner.prune_configs
    recording.tracer.instrument(model)
    for tokens in (3, 3, 5, 3, 5):
        model(torch.ones(tokens, 8))
    assert [step.warmup for step in recording.records()] == [True, False, True, False, False]
    assert recording.tracer.guard.errors == {}
    assert Autotuner.prune_configs is plain


def test_a_tuner_that_is_imported_inside_a_step_is_seen(
    record: Make, monkeypatch: pytest.MonkeyPatch, triton: ModuleType
) -> None:
    """Kernels are often imported by the first forward that needs one: that step, and later shapes."""
    recording, model, plain = record(buffers=8), Model(), Autotuner.prune_configs
    recording.tracer.instrument(model)
    model.before = lambda: monkeypatch.setitem(sys.modules, TUNER, triton)
    for tokens in (3, 3, 5):
        model(torch.ones(tokens, 8))
    assert [step.warmup for step in recording.records()] == [True, False, True]
    assert Autotuner.prune_configs is plain


def test_a_tuner_is_left_alone_where_nothing_is_instrumented(
    record: Make, monkeypatch: pytest.MonkeyPatch, triton: ModuleType
) -> None:
    """Before, and after the last model was let go."""
    monkeypatch.setitem(sys.modules, TUNER, triton)
    recording, model, plain = record(buffers=8), Model(), Autotuner.prune_configs
    with recording.tracer.step():
        assert Autotuner.prune_configs is plain
    recording.tracer.instrument(model)
    with recording.tracer.step():
        assert Autotuner.prune_configs is not plain
    recording.tracer.uninstrument()
    with recording.tracer.step():
        assert Autotuner.prune_configs is plain
        model(torch.ones(3, 8))
    assert recording.tracer.guard.errors == {}
