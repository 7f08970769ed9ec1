"""Placements on the model side: what is taken, what is refused, and that they reach the collector."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import moetrace
from moetrace.config import Config
from moetrace.emit import otlp
from moetrace.emit.otlp import OtlpEmitter, to_placement_span
from moetrace.errors import ConfigError
from moetrace.record.placement import PlacementRecord, make_map, make_terms
from moetrace_schemas import attributes
from moetrace_schemas.columns import PLACEMENT, unpack
from moetrace_schemas.identity import trace_id
from moetrace_schemas.placement import PlacementMap

from .otlp_server import FakeCollector, wait_until
from .records import CONTEXT, step_record
from .test_otlp import Sender

Make = Callable[..., Any]
MAP = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]]


def placement_record(version: int = 3, step: int = 7) -> PlacementRecord:
    """A placement of two layers."""
    return PlacementRecord(
        version=version,
        step=step,
        map=make_map(MAP, layers=[1, 4], num_experts=None, ranks=2),
        terms=make_terms({"policy_version": "p1", "proposed_by": "balancer", "window": (0, 6)}),
        start_unix_ns=1_900_000_000_000_000_000,
    )


@pytest.mark.parametrize("form", ["lists", "tuples", "numpy", "torch", "list of tensors", "slots", "experts"])
def test_every_form_that_engines_use_is_one_map(form: str) -> None:
    """Lists, arrays, tensors and dictionaries of the same placement give the same map and digest."""
    import numpy
    import torch

    of_experts = {
        layer: {
            expert: [slot for slot, held in enumerate(row) if held == expert] + [-1] for expert in range(4)
        }
        for layer, row in enumerate(MAP)
    }
    given: dict[str, Any] = {
        "lists": MAP,
        "tuples": tuple(map(tuple, MAP)),
        "numpy": numpy.array(MAP),
        "torch": torch.tensor(MAP),
        "list of tensors": [torch.tensor(row) for row in MAP],
        "slots": dict(enumerate(MAP)),
        "experts": of_experts,
    }
    made = make_map(given[form], layers=None, num_experts=None, ranks=3)
    expected = PlacementMap(
        layers=(0, 1), physical_to_logical=tuple(map(tuple, MAP)), num_experts=4, num_ranks=3
    )
    assert made == expected
    assert made.digest() == expected.digest()


def test_layers_are_those_of_the_model_where_they_fit() -> None:
    """EPLB's rows count MoE layers from 0; the model may number its blocks from 1."""
    assert make_map(MAP, layers=None, num_experts=None, ranks=1, known_layers=(1, 2)).layers == (1, 2)
    assert make_map(MAP, layers=None, num_experts=None, ranks=1, known_layers=(1, 2, 3)).layers == (0, 1)
    assert make_map(MAP[0], layers=[9], num_experts=None, ranks=1).layers == (9,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"given": "x"}, r"\[layers\]\[slots\] of logical experts expected .* got str"),
        ({"given": []}, r"\[layers\]\[slots\]"),
        ({"given": [[0, 1.5]]}, "layer 0 slot 1: a whole number expected, got 1.5"),
        ({"given": [[0, 1], [0]]}, "layer 1 has 1 slots, layer 0 has 2"),
        ({"given": [[0, 1, 0]], "ranks": 2}, r"3 slots on 2 ranks: .* \(ranks=\)"),
        ({"given": [[0, 2]]}, "layer 0 has no slot for expert 1"),
        ({"given": [[0, 4]], "num_experts": 3}, "layer 0 slot 1 holds 4: experts are 0 to 2"),
        ({"given": [[0], [0]], "layers": [3]}, "1 layer numbers for 2 layers"),
        ({"given": [[0], [0]], "layers": [3, 3]}, "ascending numbers"),
        ({"given": {0: {0: 1, 1: 1}}}, "layer 0 slot 1: held by experts 0 and 1"),
    ],
)
def test_a_map_that_cannot_be_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    """The message names the place and what was expected."""
    with pytest.raises(ConfigError, match=message) as error:
        make_map(**{"layers": None, "num_experts": None, "ranks": 1, **arguments})
    assert "\n" not in str(error.value)


def test_a_map_on_a_device_is_refused_and_not_waited_for() -> None:
    """Reading it would sync the device; copying is the caller's decision."""
    import torch

    with pytest.raises(ConfigError, match=r"on device meta, reading it would wait .*: pass map\.cpu\(\)"):
        make_map(torch.zeros(2, 4, device="meta"), layers=None, num_experts=None, ranks=1)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"treshold": 1}, "treshold=: no such term; one of policy_version, "),
        ({"window": (5, 2)}, r"window=\(5, 2\)"),
        ({"max_slowdown": -0.1}, "max_slowdown=-0.1"),
        ({"rollback_version": -1}, "rollback_version=-1"),
        ({"expert_bytes": 0}, "expert_bytes=0"),
        ({"count_ids": "slots"}, "slots"),
        ({"weight_digests": {"w": "XYZ"}}, "hex digits"),
    ],
)
def test_terms_that_cannot_be_are_refused(terms: dict[str, Any], message: str) -> None:
    """One line that names the term."""
    with pytest.raises(ConfigError, match=message):
        make_terms(terms)


def test_a_placement_comes_before_the_first_step_under_it(record: Make) -> None:
    """The collector knows the map before it reads counts that need it."""
    recording = record()
    with recording.tracer.step():
        recording.tracer.placement(4, MAP, ranks=2, proposed_by="balancer")
    with recording.tracer.step():
        pass
    assert [step.placement_version for step in recording.records()] == [0, 4]
    (placement,) = recording.emitter.placements
    assert (placement.version, placement.step, placement.map.num_ranks) == (4, 1, 2)
    assert placement.terms.proposed_by == "balancer"


def test_nothing_is_changed_by_a_placement_that_is_refused(record: Make) -> None:
    """A wrong map leaves the version as it was."""
    recording = record()
    recording.tracer.placement(2)
    with pytest.raises(ConfigError, match="has no slot for expert 0"):
        recording.tracer.placement(3, [[1, 1]])
    with pytest.raises(ConfigError, match="terms without a map"):
        recording.tracer.placement(3, proposed_by="x")
    with recording.tracer.step():
        pass
    assert [step.placement_version for step in recording.records()] == [2]
    assert recording.emitter.placements == []


def test_without_a_tracer_it_is_nothing() -> None:
    """Code that announces placements runs untraced."""
    moetrace.placement(1, [[0, 1]])


def test_the_span_holds_the_map_and_lies_in_the_trace_of_its_step() -> None:
    """What the collector reads: packed slots, terms, and the step's own trace id."""
    span = to_placement_span(placement_record(), Sender(Config()))
    columns, values = unpack(PLACEMENT, span.attributes[attributes.COLUMNS_PLACEMENT])
    assert (list(columns["layer"]), list(values)) == ([1, 4], MAP[0] + MAP[1])
    assert span.name == "moe.placement"
    assert span.context.trace_id == trace_id(CONTEXT.run_id, 7)
    assert set(attributes.PLACEMENT_REQUIRED) <= set(span.attributes)
    assert span.attributes[attributes.PLACEMENT_POLICY] == "p1"
    assert attributes.PLACEMENT_WEIGHTS not in span.attributes


def test_a_placement_survives_the_collector_being_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps may be dropped meanwhile; the placement arrives once, in front of the steps, when it is back."""
    monkeypatch.setattr(otlp, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(otlp, "LONGEST_BACKOFF_S", 0.002)
    monkeypatch.setattr(otlp, "LINGER_S", 0.0)
    server = FakeCollector()
    try:
        server.statuses = [400] * (otlp.ATTEMPTS + 1)
        sender = Sender(Config(endpoint=server.endpoint, export_timeout_s=2.0))
        emitter = OtlpEmitter(lambda: sender, sender.metrics, sender.config)
        emitter.emit(step_record(0))
        emitter.emit_placement(placement_record())
        wait_until(lambda: server.refused > otlp.ATTEMPTS)
        emitter.emit(step_record(8))
        wait_until(lambda: len(server.spans()) >= 2)
        assert emitter.close(time.monotonic() + 5.0)
        assert [span.name for span in server.spans()].count("moe.placement") == 1
        assert server.spans()[0].name == "moe.placement"
    finally:
        server.close()


class RefusesPlacements:
    """An exporter whose collector takes steps only."""

    def __init__(self) -> None:
        self.steps = 0

    def export(self, batch: Any) -> Any:
        """Take a batch without placements."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        if any(span.name == "moe.placement" for span in batch):
            return SpanExportResult.FAILURE
        self.steps += len(batch)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing."""


def test_a_placement_that_is_refused_does_not_hold_up_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps pass without it, and after a few refusals it is given up."""
    monkeypatch.setattr(otlp, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(otlp, "LINGER_S", 0.0)
    exporter = RefusesPlacements()
    sender = Sender(Config())
    emitter = OtlpEmitter(lambda: sender, sender.metrics, sender.config, exporter)  # type: ignore[arg-type]
    emitter.emit_placement(placement_record())
    for step in range(otlp.REFUSALS):
        emitter.emit(step_record(step))
        wait_until(lambda wanted=step + 1: exporter.steps >= wanted)
    wait_until(lambda: not emitter._placements)
    assert emitter.close(time.monotonic() + 5.0)
    assert sender.metrics.dropped.total() == 0
