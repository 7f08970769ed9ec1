"""What every framework is held to: a model that is run plainly, then traced, then plainly again.

Free of pytest, so that it also runs in a rank of another environment. A failed check is an
AssertionError that says what differs.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import moetrace
from moetrace.instrument.torch_state import graphs_compiled
from moetrace.record.types import StepRecord
from moetrace.testing import MemoryEmitter
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import CountKind, Direction, Phase

STEPS = 2


@dataclass
class Truth:
    """Counts per layer and kind that the test takes by its own means, while `on`."""

    on: bool = False
    counts: dict[tuple[int, CountKind], torch.Tensor] = field(default_factory=dict)

    def add(self, layer: int, counts: torch.Tensor, kind: CountKind = CountKind.ROUTED) -> None:
        """Add pairs per expert of one call."""
        if self.on:
            have = self.counts.get((layer, kind))
            self.counts[layer, kind] = counts.clone() if have is None else have + counts

    def add_ids(self, layer: int, ids: torch.Tensor, num_experts: int) -> None:
        """Add the ids of one call, by counting in another way than the library does."""
        self.add(layer, torch.tensor([int((ids == expert).sum()) for expert in range(num_experts)]))

    def exchange(self, rank: int, ranks: int, num_experts: int) -> None:
        """Rows that this rank's experts receive: what all ranks chose, for experts placed in order."""
        mine = {layer: counts for (layer, kind), counts in self.counts.items() if kind is CountKind.ROUTED}
        everyone: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(everyone, mine)
        local = num_experts // ranks
        for layer in mine:
            received = torch.stack([counts[layer] for counts in everyone]).sum(0)
            received[: rank * local] = 0
            received[(rank + 1) * local :] = 0
            self.counts[layer, CountKind.RECEIVED] = received


def sequence(record: StepRecord, layer: int, direction: Direction = Direction.FORWARD) -> list[str]:
    """Phases of a layer in order, neighbours of one name as one; `!` marks the exchange itself."""
    names: list[str] = []
    for row in record.phases:
        if row.layer != layer or row.phase is Phase.OUTSIDE or row.direction is not direction:
            continue
        name = f"{row.phase}{'!' if row.flags & RowFlag.BARRIER else ''}"
        if not names or names[-1] != name:
            names.append(name)
    return names


def counts_of(record: StepRecord, kind: CountKind = CountKind.ROUTED) -> dict[int, list[int]]:
    """Counts per layer of one kind."""
    return {row.layer: list(row.counts) for row in record.experts if row.kind is kind}


@contextmanager
def unchanged(owners: Iterable[Any]) -> Any:
    """Fails unless every owner's own namespace holds the very same functions afterwards as before."""
    owners = list(owners)
    before = [_callables(owner) for owner in owners]
    yield
    for owner, old in zip(owners, before, strict=True):
        new = _callables(owner)
        changed = {name for name in old.keys() | new.keys() if old.get(name) is not new.get(name)}
        assert not changed, f"{owner!r:.80}: {sorted(changed)} not restored"


def _callables(owner: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(owner).items()
        # torch.compile keeps the code that it makes in the modules that it was made from.
        if (
            not name.startswith(("__compiled_fn_", "__resume_at_", "torch_dynamo_resume_in_"))
            and isinstance(
                value,
                types.FunctionType
                | types.MethodType
                | types.BuiltinFunctionType
                | staticmethod
                | classmethod
                | type,
            )
        )
        or name in ("forward", "__getstate__")
    }


@dataclass
class Traced:
    """What one traced run gave."""

    report: moetrace.CoverageReport
    records: list[StepRecord]
    errors: dict[str, int]
    expected_sites: int
    seen_sites: int
    graph_breaks: tuple[int, int]
    """Of torch.compile in the plain run, and in the first traced one."""


def compile_layers(layers: Iterable[Any], truth: Truth, run: Callable[[], Any], hooks: Iterable[Any]) -> None:
    """Take the truth from a run that is not compiled, then compile each layer in place.

    Hooks that take the truth look at the data, and would break the graphs: they are removed.
    """
    truth.on = True
    run()
    truth.on = False
    for hook in hooks:
        hook.remove()
    for layer in layers:
        layer.compile(backend="aot_eager")


def graph_breaks() -> int:
    """Breaks since the last question, where anything was compiled."""
    counters = torch._dynamo.utils.counters["graph_break"]
    total = sum(counters.values())
    counters.clear()
    return total


def trace(
    model: Any,
    run: Callable[[], list[torch.Tensor]],
    *,
    truth: Truth | None = None,
    owners: Iterable[Any] = (),
    **settings: Any,
) -> Traced:
    """Run plainly, traced, sampled out and plainly again; all results must be the same bits.

    Args:
        model: what is instrumented.
        run: one step; returns outputs and gradients. Must be repeatable.
        truth: taken from the traced steps only.
        owners: objects, classes and modules beside the model's own modules that must be restored.
        settings: further arguments of `moetrace.init`.
    """
    graph_breaks()
    plain = run()
    breaks = [graph_breaks()]
    emitter = MemoryEmitter()
    with unchanged([*model.modules(), *owners]):
        tracer = moetrace.init(
            run_id="frameworks",
            emitters=[emitter],
            endpoint="",
            buffers=STEPS + 1,
            max_intervals=1024,
            **settings,
        )
        try:
            report = moetrace.instrument(model, strict=True)
            for _ in range(STEPS):
                if truth is not None:
                    truth.counts.clear()
                    truth.on = True
                with moetrace.step():
                    traced = run()
                if truth is not None:
                    truth.on = False
                _same(plain, traced, "traced")
                breaks.append(graph_breaks())
            records = emitter.wait_for(STEPS)
            errors = dict(tracer.guard.errors)
            expected, seen = tracer.metrics.expected_sites, tracer.metrics.seen_sites
            _same(plain, run_unsampled(tracer, run), "instrumented, not sampled")
        finally:
            moetrace.shutdown()
    _same(plain, run(), "uninstrumented")
    return Traced(report, records, errors, expected, seen, (breaks[0], breaks[1]))


def run_unsampled(tracer: Any, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """One step that is not recorded."""
    period = tracer.config.sample_period
    object.__setattr__(tracer, "config", moetrace.Config.load({"sample": "0", "endpoint": ""}))
    try:
        assert period
        with moetrace.step():
            return run()
    finally:
        assert tracer.buffer is None


def _same(expected: list[torch.Tensor], actual: list[torch.Tensor], what: str) -> None:
    assert len(expected) == len(actual)
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        assert torch.equal(one, other), f"{what}: result {number} differs from the plain run"


def check(
    traced: Traced,
    truth: Truth,
    phases: list[str] | dict[int, list[str]] | None,
    *,
    kinds: Iterable[CountKind] = (CountKind.ROUTED,),
    layers: Iterable[int] | None = None,
) -> None:
    """Phases as expected in every layer and step, counts as the truth has them, nothing failed inside."""
    assert not traced.errors, traced.errors
    assert traced.seen_sites == traced.expected_sites, (
        f"{traced.seen_sites} of {traced.expected_sites} expected call sites were seen"
    )
    layers = list(layers) if layers is not None else [layer.layer for layer in traced.report.layers]
    for record in traced.records:
        assert record.violations == (), record.violations
        for layer in layers:
            expected = phases[layer] if isinstance(phases, dict) else phases
            assert expected is None or sequence(record, layer) == expected, (
                layer,
                sequence(record, layer),
                expected,
            )
        for kind in kinds:
            counted = counts_of(record, kind)
            for layer in layers:
                known = truth.counts.get((layer, kind))
                assert known is not None, f"the test has no {kind} of layer {layer}"
                assert counted.get(layer) == known.tolist(), (kind, layer, counted.get(layer), known.tolist())
        assert sum(row.duration_ns for row in record.phases) == record.duration_ns


def report(traced: Traced, **facts: Any) -> None:
    """Print what a case found as one JSON object, for the test that started it."""
    layers = [layer.layer for layer in traced.report.layers]
    record = traced.records[0]
    found = {
        "adapters": sorted({layer.adapter for layer in traced.report.layers}),
        "layers": layers,
        "phases": list(traced.report.phases),
        # The same in every step and layer, or each of them.
        "sequences": sorted({" ".join(sequence(r, layer)) for r in traced.records for layer in layers}),
        "backward": sorted(
            {" ".join(sequence(r, layer, Direction.BACKWARD)) for r in traced.records for layer in layers}
        ),
        "graph_breaks": traced.graph_breaks,
        "graphs": graphs_compiled(),
        "traffic": [(t.layer, t.phase, t.row_bytes, list(t.rows)) for t in record.traffic],
        # Rows of each exchange in the forward, -1 where they are not known.
        "exchanged": [
            (row.layer, row.phase, row.rows)
            for row in record.phases
            if row.flags & RowFlag.BARRIER and row.direction is Direction.FORWARD
        ],
        "kinds": sorted({row.kind for row in record.experts}),
        **facts,
    }
    print(json.dumps(found))
