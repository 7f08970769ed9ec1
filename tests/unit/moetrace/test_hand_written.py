"""`wrap` and `phase`: hand-written MoE code without an adapter."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import checkpoint

from compiled_models import needs_marks
from moetrace.emit.jsonl import to_json
from moetrace.errors import ConfigError
from moetrace.instrument import compiled
from moetrace_schemas.enums import CountKind, Phase

from .conftest import Recording
from .intervals import lines

Make = Callable[..., Recording]
PARTS = ("router", "permute", "dispatch", "experts", "combine", "unpermute", "shared_expert")


def test_every_part_is_timed_under_its_name(record: Make) -> None:
    """One call of each part is one row each, in the order of the step."""
    recording = record()

    def part() -> None:
        recording.time.advance(10)

    wrapped = recording.tracer.wrap(layer=3, **dict.fromkeys(PARTS, part))
    with recording.tracer.step():
        for name in PARTS:
            getattr(wrapped, name)()
    (step,) = recording.records()
    assert lines(step.phases) == [
        "3 router 0-10",
        "3 permute 10-20",
        "3 dispatch 20-30 barrier",
        "3 expert_gemm 30-40",
        "3 combine 40-50 barrier",
        "3 unpermute 50-60",
        "3 shared_expert 60-70",
    ]


def test_a_module_is_wrapped_in_place_and_returned(record: Make) -> None:
    """The model keeps its module; `uninstrument` takes the wrapper off again."""
    recording, gate = record(), nn.Linear(4, 4)
    before = dict(vars(gate))
    assert recording.tracer.wrap(router=gate, layer=0).router is gate
    with recording.tracer.step():
        gate(torch.randn(1, 4))
    recording.tracer.uninstrument()
    assert dict(vars(gate)) == before
    (step,) = recording.records()
    assert len(step.seen_sites) == 1


def test_wrapping_twice_is_wrapping_once(record: Make) -> None:
    """A part that is wrapped already comes back as it is, function or module."""
    recording, gate = record(), nn.Linear(4, 4)
    first = recording.tracer.wrap(router=gate, experts=lambda: None, layer=0)
    second = recording.tracer.wrap(router=gate, experts=first.experts, layer=0)
    assert second.experts is first.experts
    with recording.tracer.step():
        gate(torch.randn(1, 4))
        second.experts()
    (step,) = recording.records()
    assert len(step.seen_sites) == 2


class Owner(nn.Module):
    """Hand-written code whose experts are a method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Any work with the object's own weights."""
        return rows * self.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """One layer."""
        return self.experts(rows)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_a_copy_of_what_a_wrapped_method_belongs_to_is_plain_and_has_its_own_weights(
    record: Make, copy_of: Callable[[Owner], Owner]
) -> None:
    """An averaged copy of a model, or a saved one, computes with its own weights and is not recorded."""
    recording, owner = record(), Owner()
    owner.experts = recording.tracer.wrap(experts=owner.experts, layer=0).experts  # type: ignore[method-assign]
    twin = copy_of(owner)
    with torch.no_grad():
        twin.weight.zero_()
    rows = torch.ones(2)
    with recording.tracer.step():
        assert twin(rows).tolist() == [0.0, 0.0]
    with recording.tracer.step():
        assert owner(rows).tolist() == [3.0, 3.0]
    of_twin, of_owner = recording.records()
    assert len(of_twin.seen_sites) == 0
    assert len(of_owner.seen_sites) == 1


def test_a_wrapped_method_is_wrapped_once_and_named_as_before(record: Make) -> None:
    """Wrapping what is wrapped changes nothing; it is still a method of its object."""
    recording, owner = record(), Owner()
    once = recording.tracer.wrap(experts=owner.experts, layer=0).experts
    assert recording.tracer.wrap(experts=once, layer=0).experts is once
    assert once.__self__ is owner
    assert once.__name__ == "experts"


@needs_marks
def test_a_wrapped_method_is_recorded_inside_a_compiled_graph(record: Make) -> None:
    """No graph break, the same numbers, and the call is seen."""
    recording, owner = record(), Owner()
    owner.experts = recording.tracer.wrap(experts=owner.experts, layer=0).experts  # type: ignore[method-assign]
    model = torch.compile(owner, backend="aot_eager", fullgraph=True)
    model(torch.ones(2))
    with recording.tracer.step():
        assert model(torch.ones(2)).tolist() == [3.0, 3.0]
    (step,) = recording.records()
    assert len(step.seen_sites) == 1


def test_a_function_of_a_tracer_that_has_ended_is_wrapped_for_the_next_one(record: Make) -> None:
    """As after `init` in a forked child, or in a cell of a notebook that runs again."""
    before, after = record(), record()
    wrapped = before.tracer.wrap(experts=lambda: None, layer=0).experts
    before.tracer.shutdown()
    again = after.tracer.wrap(experts=wrapped, layer=0).experts
    with after.tracer.step():
        again()
    (step,) = after.records()
    assert len(step.seen_sites) == 1
    assert before.records() == []


def test_a_method_of_a_tracer_that_has_ended_is_wrapped_for_the_next_one(record: Make) -> None:
    """As a function is; it stays a method of its object."""
    before, after, owner = record(), record(), Owner()
    wrapped = before.tracer.wrap(experts=owner.experts, layer=0).experts
    before.tracer.shutdown()
    again = after.tracer.wrap(experts=wrapped, layer=0).experts
    with after.tracer.step():
        assert again(torch.ones(2)).tolist() == [3.0, 3.0]
    (step,) = after.records()
    assert len(step.seen_sites) == 1
    assert before.records() == []
    assert again.__self__ is owner


def test_with_num_experts_the_routers_ids_are_counted(record: Make) -> None:
    """Counts per expert of the named layer equal what the router chose."""
    recording = record()
    ids = torch.tensor([[0, 1], [1, 2], [1, 7]])
    wrapped = recording.tracer.wrap(router=lambda: (torch.rand(3, 2), ids), layer=5, num_experts=4)
    with recording.tracer.step():
        wrapped.router()
    (step,) = recording.records()
    assert [(row.layer, row.kind, row.counts) for row in step.experts] == [
        (5, CountKind.ROUTED, (1, 3, 1, 0)),
        (5, CountKind.INVALID, (1,)),
    ]


def test_layers_that_are_wrapped_one_after_the_other_are_counted_each(record: Make) -> None:
    """A later call of `wrap` does not lose what an earlier one counts."""
    recording = record()
    routers = [
        recording.tracer.wrap(router=lambda: torch.tensor([[1]]), layer=layer, num_experts=2).router
        for layer in range(3)
    ]
    with recording.tracer.step():
        for router in routers:
            router()
    (step,) = recording.records()
    assert [(row.layer, row.counts) for row in step.experts] == [(0, (0, 1)), (1, (0, 1)), (2, (0, 1))]


def test_numbers_of_numpy_are_recorded_as_pythons(record: Make) -> None:
    """Layers, experts and microbatches may come from an array; files and spans hold Python's numbers only."""
    recording = record()
    layer, experts, microbatch = np.int64(3), np.int64(4), np.int64(1)
    wrapped = recording.tracer.wrap(router=lambda: torch.tensor([[1]]), layer=layer, num_experts=experts)
    with recording.tracer.step(microbatch=microbatch):  # type: ignore[arg-type]
        wrapped.router()
        with recording.tracer.phase("dispatch", layer=layer):  # type: ignore[arg-type]
            recording.time.advance(1)
    (step,) = recording.records()
    written = json.loads(json.dumps(to_json(step, recording.tracer.context)))
    assert written["microbatch"] == 1
    assert set(written["phases"]["layer"]) == {3}
    assert [row["layer"] for row in written["experts"]] == [3]


def test_without_num_experts_nothing_is_counted(record: Make) -> None:
    """A router without a known number of experts is timed only."""
    recording = record()
    wrapped = recording.tracer.wrap(router=lambda: torch.tensor([[0]]), layer=0)
    with recording.tracer.step():
        wrapped.router()
    assert recording.records()[0].experts == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gate": print}, r"wrap\(gate=...\): no such part; known: router, permute, dispatch, experts,"),
        ({"router": 5}, r"wrap\(router=5\): a callable expected"),
        ({"router": print, "layer": -1}, "layer=-1: 0 to 32767 expected"),
        ({"router": print, "layer": 40_000}, "layer=40000: 0 to 32767 expected"),
        ({"router": print, "layer": 0, "num_experts": 0}, "num_experts=0: 1 to 65536 expected"),
        ({"router": print, "layer": 0, "num_experts": 10**9}, "num_experts=1000000000: 1 to 65536 expected"),
        ({"router": print, "layer": 0, "num_experts": "8"}, "num_experts='8': a whole number expected"),
        ({"router": print, "layer": "a"}, "layer='a': a whole number expected"),
        ({"router": print, "num_experts": 8}, "num_experts=8: counts are per layer: layer=... is needed too"),
    ],
)
def test_a_wrong_argument_is_a_configuration_error(
    record: Make, arguments: dict[str, Any], message: str
) -> None:
    """The message names the argument, its value and what is allowed."""
    with pytest.raises(ConfigError, match=message):
        record().tracer.wrap(**arguments)


def test_a_wrong_argument_leaves_the_good_ones_alone(record: Make) -> None:
    """Everything is checked before anything is wrapped."""
    recording, gate = record(), nn.Linear(4, 4)
    before = dict(vars(gate))
    with pytest.raises(ConfigError):
        recording.tracer.wrap(router=gate, unknown=print, layer=0)
    assert dict(vars(gate)) == before


def test_a_wrapped_function_keeps_its_exceptions(record: Make) -> None:
    """The very same exception arrives, and the row carries the error."""
    recording = record()
    error = ValueError("of the model")

    def part() -> None:
        recording.time.advance(1)
        raise error

    wrapped = recording.tracer.wrap(experts=part, layer=0)
    with pytest.raises(ValueError, match="of the model") as caught, recording.tracer.step():
        wrapped.experts()
    assert caught.value is error
    assert lines(recording.records()[0].phases) == ["0 expert_gemm 0-1 error"]


def test_a_phase_is_timed_as_a_block(record: Make) -> None:
    """With a layer it is a row of that layer; nested phases are told apart."""
    recording = record()
    with recording.tracer.step():
        with recording.tracer.phase("permute", layer=2):
            recording.time.advance(5)
            with recording.tracer.phase(Phase.DISPATCH):
                recording.time.advance(7)
        with recording.tracer.phase("expert_gemm", layer=2):
            recording.time.advance(3)
    (step,) = recording.records()
    assert lines(step.phases) == ["2 permute 0-5", "2 dispatch 5-12 barrier", "2 expert_gemm 12-15"]


def test_a_phase_without_a_layer_around_it_counts_at_step_level(record: Make) -> None:
    """Serving phases belong to the step; nothing that was named is lost."""
    recording = record()
    with recording.tracer.step():
        with recording.tracer.phase("schedule"):
            recording.time.advance(4)
        with recording.tracer.phase("router"):
            recording.time.advance(2)
    assert lines(recording.records()[0].phases) == ["-1 schedule 0-4", "-1 router 4-6"]


def test_a_phase_outside_a_step_is_not_recorded(record: Make) -> None:
    """Nothing happens but the body."""
    recording = record()
    with recording.tracer.phase("router", layer=0):
        recording.time.advance(4)
    assert recording.records() == []


def test_an_exception_passes_a_phase_unchanged_and_marks_it(record: Make) -> None:
    """Control flow as well as errors."""
    recording = record()
    error = KeyboardInterrupt()

    def step() -> None:
        with recording.tracer.step(), recording.tracer.phase("router", layer=0):
            recording.time.advance(1)
            raise error

    with pytest.raises(KeyboardInterrupt) as caught:
        step()
    assert caught.value is error
    assert lines(recording.records()[0].phases) == ["0 router 0-1 error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dispach",), "phase='dispach': one of outside, router, permute, dispatch, expert_gemm"),
        (("router", -2), "layer=-2: 0 to 32767 expected"),
        (("router", 32_768), "layer=32768: 0 to 32767 expected"),
    ],
)
def test_a_wrong_phase_is_a_configuration_error(
    record: Make, arguments: tuple[Any, ...], message: str
) -> None:
    """It is raised where it is written, before the body runs, in a step or not."""
    phase, *layer = arguments
    with pytest.raises(ConfigError, match=message):
        record().tracer.phase(phase, layer=layer[0] if layer else None)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_phase_in_activation_recompute_is_backward(record: Make, early_stop: bool) -> None:
    """Hand-written code under checkpointing is told apart as adapters' layers are, left early or not."""
    recording = record()
    x = torch.ones(2, requires_grad=True)

    def layer(value: torch.Tensor) -> torch.Tensor:
        with recording.tracer.phase("router", layer=0):
            recording.time.advance(5)
            return (value * value).sin()

    with recording.tracer.step(), checkpoint.set_checkpoint_early_stop(early_stop):
        checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert lines(recording.records()[0].phases) == ["0 router 0-5", "0 router 5-10 backward recompute"]


def test_a_clock_that_fails_in_a_phase_never_reaches_the_model(record: Make) -> None:
    """The body runs; the fault is counted."""
    recording, ran = record(), []
    with recording.tracer.step():
        buffer = recording.tracer.buffer
        assert buffer is not None
        mark, marks = buffer.mark, iter([1])
        buffer.mark = lambda: next(marks)
        for _ in range(2):
            with recording.tracer.phase("router", layer=0):
                ran.append(1)
        buffer.mark = mark
    assert ran == [1, 1]
    assert recording.tracer.guard.errors == {"record": 2}


BEFORE_TORCH = """
import sys
import moetrace
from moetrace.testing import MemoryEmitter
kept = MemoryEmitter()
tracer = moetrace.init(run_id="r", rank=0, world_size=2, emitters=[kept])
parts = moetrace.wrap(
    layer=3,
    router=lambda rows: rows * 2,
    dispatch=lambda rows: rows + 0,
    experts=lambda rows: rows * rows * 3 + weights,
)

def layer(rows):
    return parts.experts(parts.dispatch(parts.router(rows)))

for rows in (1, 2):
    with moetrace.step():
        weights = 0
        assert layer(rows) == 12 * rows**2
assert "torch" not in sys.modules

import torch
from torch.utils.checkpoint import checkpoint
weights = torch.ones(4, requires_grad=True)

before = torch.distributed.all_to_all_single
with moetrace.step():
    checkpoint(layer, torch.ones(4, requires_grad=True), use_reentrant=False).sum().backward()
assert torch.distributed.all_to_all_single is not before
run = torch.compile(layer, backend="aot_eager", fullgraph=True)
for _ in range(2):
    with moetrace.step():
        run(torch.ones(4, requires_grad=True)).sum().backward()
assert torch.equal(weights.grad, torch.full((4,), 3.0))
assert tracer.guard.errors == {}
moetrace.shutdown()
assert torch.distributed.all_to_all_single is before
for step in kept.wait_for(5):
    told = {("recompute" if row.flags & 2 else row.direction.value, row.phase.value) for row in step.phases}
    print(*(f"{way}:{phase}" for way, phase in sorted(told) if phase in ("router", "expert_gemm")))
"""


def test_code_that_was_wrapped_before_torch_was_imported_is_recorded_like_any() -> None:
    """Backward, recompute, compilation and exchanges are known from the first step with torch there.

    Where torch keeps no marks in graphs, what is compiled runs as ever, and nothing of it is recorded.
    """
    done = subprocess.run([sys.executable, "-c", BEFORE_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    forward = "forward:expert_gemm forward:router"
    backward = "backward:expert_gemm backward:router"
    assert done.stdout.splitlines() == [
        forward,
        forward,
        f"{backward} {forward} recompute:expert_gemm recompute:router",
        *([f"{backward} {forward}"] * 2 if compiled.AVAILABLE else ["", ""]),
    ]
