"""torch.export without Dynamo, torch.jit.trace, make_fx: a forward that shows its ops is not recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_models import Decoder
from moetrace.instrument.routing import CountSite, StepCounter
from moetrace.instrument.torch_state import TorchState
from moetrace_schemas.enums import CountKind

Make = Callable[..., Any]


def _ops(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("in_step", [False, True])
def test_a_forward_that_only_shows_its_ops_is_no_step(record: Make, in_step: bool) -> None:
    """torch.export without Dynamo runs the forward with fake tensors: the program has the model's ops alone,
    nothing of it is recorded, in an open step neither, and steps after it count as ever.
    """
    recording, model, tokens = record(), Decoder(), torch.randn(3, 8)
    plain = _ops(torch.export.export(Decoder(), (tokens,), strict=False))
    recording.tracer.instrument(model)
    with torch.no_grad(), recording.tracer.step() if in_step else nullcontext():
        program = torch.export.export(model, (tokens,), strict=False)
        assert _ops(program) == plain
        assert "moetrace" not in str(program.graph)
        model(tokens)
    (step,) = recording.records()
    assert recording.tracer.guard.errors == {}
    assert [(row.layer, row.kind, sum(row.counts)) for row in step.experts] == [
        (layer, CountKind.ROUTED, 6) for layer in (0, 1)
    ]


def test_an_older_torch_says_so_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_exporting` is newer than what is supported; where Dynamo does not trace, `is_compiling` is that."""
    monkeypatch.delattr(torch.compiler, "is_exporting")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert TorchState().exporting()


def _script(model: torch.nn.Module, tokens: torch.Tensor) -> list[str]:
    script = torch.jit.trace(model, (tokens,), check_trace=False)  # type: ignore[no-untyped-call]
    return [node.kind() for node in script.inlined_graph.nodes()]


def _fx(model: torch.nn.Module, tokens: torch.Tensor) -> list[str]:
    return [str(node.target) for node in make_fx(model)(tokens).graph.nodes]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", [_script, _fx])
@pytest.mark.parametrize("in_step", [False, True])
def test_a_forward_that_is_traced_to_a_program_is_no_step(record: Make, in_step: bool, kinds: Make) -> None:
    """torch.jit.trace, as old ONNX exports use it, and make_fx: no counts in the program, nor of tracing."""
    recording, model, tokens = record(), Decoder(), torch.randn(3, 8)
    recording.tracer.instrument(model)
    with torch.no_grad():
        plain = kinds(Decoder(), tokens)
        with recording.tracer.step() if in_step else nullcontext():
            assert kinds(model, tokens) == plain
            model(tokens)
    (step,) = recording.records()
    assert recording.tracer.guard.errors == {}
    assert [sum(row.counts) for row in step.experts] == [6, 6]


def test_what_was_counted_with_fake_tensors_leaves_nothing_behind() -> None:
    """A pass that looks at shapes adds nothing, and real calls of the same shape count after it."""
    counter = StepCounter([CountSite(0, 4)], torch.device("cpu"))
    counter.begin(checking=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        counter.add(0, torch.zeros(3, 2, dtype=torch.int64))
    counter.begin(checking=False)
    counter.add(0, torch.zeros(3, 2, dtype=torch.int64))
    counter.finish()
    assert [(row.kind, row.counts) for row in counter.rows()] == [(CountKind.ROUTED, (6, 0, 0, 0))]
