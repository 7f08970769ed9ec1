"""Experts that are called one by one, inside a compiled graph: rows are counted there, without a break."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import moetrace
from compiled_models import needs_marks
from frameworks.checks import counts_of
from moetrace.testing import MemoryEmitter

pytestmark = needs_marks
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
EXPERTS, HIDDEN = 3, 8


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    moetrace.shutdown()


class Block(nn.Module):
    """A `gate` beside a list of `experts`; which rows an expert gets is known from their number alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Expert e takes every row from its own number on."""
        scores = self.gate(hidden).softmax(-1)
        parts = [
            expert(hidden[number:]).sum(0) * scores[:, number].sum()
            for number, expert in enumerate(self.experts)
        ]
        return torch.stack(parts).sum(0)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)])
def test_rows_are_those_of_each_run_and_not_of_the_trace(backend: str) -> None:
    """One graph for all numbers of rows; counts and results equal those without torch.compile."""
    model, emitter = Block(), MemoryEmitter()
    sizes = [6, 9, 13]
    inputs = [torch.randn(size, HIDDEN) for size in sizes]
    tracer = moetrace.init(run_id="rows", emitters=[emitter], endpoint="")
    moetrace.instrument(model, strict=True)
    expected = [model(hidden).detach() for hidden in inputs]
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    results = [compiled(hidden) for hidden in inputs]
    for one, other in zip(expected, results, strict=True):
        torch.testing.assert_close(one, other)
    records = emitter.wait_for(2 * len(sizes))
    assert tracer.guard.errors == {}
    for record, size in zip(records, [*sizes, *sizes], strict=True):
        assert counts_of(record) == {0: [size - number for number in range(EXPERTS)]}
    results[-1].sum().backward()
