"""Traps of counting, each of which has made some system report a wrong load; each test bears its trap's name.

Those that need several ranks are in tests/integration/test_rank_counts.py, those of the figures that are
made of counts in tests/unit/collectors/test_counting_traps.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

from compiled_models import needs_marks
from moetrace.adapters.base import DispatchResult
from moetrace.adapters.capacity import count_admitted, count_dropped
from moetrace.adapters.reference import ReferenceMoE
from moetrace.instrument.counted import counted as counted_call
from moetrace.instrument.recorders import key_of
from moetrace.instrument.routing import CountSite, StepCounter, padding_flags
from moetrace.record.receipts import receipts, settle
from moetrace.record.types import ExpertRow, StepRecord
from moetrace_schemas.enums import CountKind, ForwardMode, Phase

from .conftest import Recording

Make = Callable[..., Recording]
CPU = torch.device("cpu")
HIDDEN = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A few reference layers, recomputed in backward where asked."""

    def __init__(self, layers: int = 1, *, recomputed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ReferenceMoE(8, 16, num_experts=4, top_k=2) for _ in range(layers))
        self.recomputed = recomputed

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """One after the other."""
        for layer in self.layers:
            if self.recomputed:
                hidden = checkpoint.checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return hidden


def totals(step: StepRecord) -> dict[CountKind, int]:
    """Pairs of one step by kind."""
    found: dict[CountKind, int] = {}
    for row in step.experts:
        found[row.kind] = found.get(row.kind, 0) + sum(row.counts)
    return found


def counted(counter: StepCounter) -> dict[CountKind, tuple[int, ...]]:
    """Rows of a counter of one layer by kind."""
    return {row.kind: row.counts for row in counter.rows()}


def test_padding_tokens_counted(record: Make) -> None:
    """Tokens that the attention mask leaves out are routed like others; they are told apart."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    model(HIDDEN, attention_mask=torch.tensor([[1, 1, 1, 0, 0]]))
    (step,) = recording.records()
    assert totals(step) == {CountKind.ROUTED: 6, CountKind.PADDING: 4}


def test_phantom_expert_0() -> None:
    """Rows without a token carry zeros, or -1: the first are padding, the second invalid; neither is load."""
    counter = StepCounter([CountSite(0, 4)], CPU)
    counter.padding = padding_flags(torch.tensor([[1, 1, 0]]))
    counter.add(0, torch.tensor([[2, 3], [-1, -1], [0, 0]]))
    assert counted(counter) == {
        CountKind.ROUTED: (0, 0, 1, 1),
        CountKind.PADDING: (2, 0, 0, 0),
        CountKind.INVALID: (2,),
    }


def test_activation_recompute_double_counts(record: Make) -> None:
    """A forward that runs again in backward is told as recompute, on both sides."""
    recording, model = record(), Model(recomputed=True)
    recording.tracer.instrument(model)
    with recording.tracer.step():
        model(HIDDEN.clone().requires_grad_()).sum().backward()
    (step,) = recording.records()
    assert totals(step) == {CountKind.ROUTED: 10, CountKind.RECOMPUTE: 10}


@pytest.mark.parametrize("in_graph", [False, pytest.param(True, marks=needs_marks)], ids=["eager", "graph"])
def test_activation_recompute_of_replicas_is_noted_once(record: Make, in_graph: bool) -> None:
    """Pairs by physical expert are the routed ones once more: a recompute adds to neither, and once apart."""
    tracer = record().tracer
    tracer.set_count_sites([CountSite(0, 4), CountSite(0, 6, CountKind.PHYSICAL)], CPU)
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]])

    def see(counter: Any, index: int, args: Any, kwargs: Any, result: Any) -> None:
        counter.add(index, result)

    calls = [counted_call(lambda: ids, tracer, see, index) for index in (0, 1)]

    def route(gradient: torch.Tensor | None = None) -> None:
        for index, call in enumerate(calls):
            if in_graph:
                torch.ops.moetrace.count_ids(ids, key_of(tracer), index)
            else:
                call()

    tokens = torch.ones(3, requires_grad=True)
    tokens.register_hook(route)
    with tracer.step():
        route()
        tokens.sum().backward()
        assert tracer.buffer is not None
        counter = tracer.buffer.counter
    assert {kind: sum(row) for kind, row in counted(counter).items()} == {
        CountKind.ROUTED: 6,
        CountKind.PHYSICAL: 6,
        CountKind.RECOMPUTE: 6,
    }


def test_dummy_or_idle_dp_batches(record: Make) -> None:
    """A batch that only keeps other ranks company is timed with all its ordinals, and is no load."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    with recording.tracer.step(dummy=True):
        model(HIDDEN)
    with recording.tracer.step():
        model(HIDDEN)
    dummy, real = recording.records()
    assert totals(dummy) == {CountKind.DUMMY: 10}
    assert (dummy.violations, dummy.coactivation) == ((), ())
    assert totals(real) == {CountKind.ROUTED: 10}
    # The collective's place in the step is kept: ranks are joined by it.
    places = [(row.layer, row.phase, row.ordinal) for row in dummy.phases]
    assert [phase for _, phase, _ in places] == [Phase.DISPATCH, Phase.COMBINE]
    assert places == [(row.layer, row.phase, row.ordinal) for row in real.phases]


def test_experts_of_an_idle_rank_are_not_idle() -> None:
    """The batch of an idle rank is nobody's; rows of others that its experts got meanwhile are work."""
    sites = [
        CountSite(0, 4, ep_size=2),
        CountSite(0, 4, CountKind.RECEIVED, offset=2, num_local_experts=2),
        CountSite(0, 4, CountKind.EXECUTED, offset=2, num_local_experts=2),
    ]
    counter = StepCounter(sites, CPU)
    counter.begin(checking=True, dummy=True)
    counter.add(0, torch.tensor([[0, 2]]))
    counter.add(1, torch.tensor([[0], [0], [1]]))
    counter.add(2, torch.tensor([[0], [0], [1]]))
    settled = settle(counter.rows(), sites, dummy=counter.dummy)
    assert [(row.kind, row.counts) for row in settled.experts] == [
        (CountKind.DUMMY, (2,)),
        (CountKind.RECEIVED, (0, 0, 2, 1)),
    ]


def test_warm_up_batches(record: Make) -> None:
    """Autotuning and first-use compilation: kept with a mark that every summary leaves out."""
    recording, model = record(warmup_steps=2), Model()
    recording.tracer.instrument(model)
    for _ in range(3):
        model(HIDDEN)
    assert [step.warmup for step in recording.records()] == [True, True, False]


def test_all_to_all_multiplicity() -> None:
    """What a router chose and what experts got are two kinds: tokens that several ranks see count once."""
    sites = [
        CountSite(0, 4, ep_size=2),
        CountSite(0, 4, CountKind.RECEIVED, offset=2, num_local_experts=2),
    ]
    counter = StepCounter(sites, CPU)
    counter.add(0, torch.tensor([[0, 2], [1, 3]]))
    # This rank's experts 2 and 3 also get the rows of the other rank.
    dispatched = DispatchResult(
        received_ids=torch.tensor([[0], [1], [0], [1]]),
        received_rows=4,
        row_bytes=16,
        send_sizes=[2, 2],
        receive_sizes=[2, 2],
    )
    counter.add(1, dispatched.received_ids)
    assert counted(counter) == {
        CountKind.ROUTED: (1, 1, 1, 1),
        CountKind.RECEIVED: (0, 0, 2, 2),
    }


def test_logical_against_physical_ids(record: Make) -> None:
    """Counts are of logical experts, and each step says under which placement they were physical."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    model(HIDDEN)
    recording.tracer.placement(3)
    model(HIDDEN)
    first, second = recording.records()
    assert (first.placement_version, second.placement_version) == (0, 3)
    # The same tokens: the placement moves weights, and never the ids.
    assert [row.counts for row in first.experts] == [row.counts for row in second.experts]


def gshard(admitted: list[list[int]], chosen: list[int]) -> tuple[Any, ...]:
    """What a gate with a capacity of 2 returns: a mask [T, E, C], and pairs per expert before drops."""
    mask = torch.zeros(len(admitted), len(chosen), 2)
    places = [0] * len(chosen)
    for token, experts in enumerate(admitted):
        for expert in experts:
            mask[token, expert, places[expert]] = 0.5
            places[expert] += 1
    return torch.zeros(()), mask, mask != 0, torch.tensor(chosen)


def test_capacity_padding() -> None:
    """Empty places of an expert are no pairs; before drops, after drops and dropped are all there."""
    counter = StepCounter([CountSite(0, 3), CountSite(0, 3, CountKind.DROPPED)], CPU)
    result = gshard([[0, 1], [0], [0, 2]][:2], [5, 1, 0])
    count_admitted(counter, 0, (), {}, result)
    count_dropped(counter, 1, (), {}, result)
    settled = settle(counter.rows(), counter.sites)
    (receipt,) = receipts(settled.experts)
    assert receipt.selected == (5, 1, 0)
    assert receipt.admitted == (2, 1, 0)
    assert receipt.dropped == (3, 0, 0)
    assert settled.violations == ()


def test_prefill_and_decode_mixed(record: Make) -> None:
    """Each step has one forward mode, and its counts are that mode's."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    with recording.tracer.step(forward_mode="prefill"):
        model(HIDDEN)
    with recording.tracer.step(forward_mode="decode"):
        model(HIDDEN[:1])
    prefill, decode = recording.records()
    assert (prefill.forward_mode, totals(prefill)) == (ForwardMode.PREFILL, {CountKind.ROUTED: 10})
    assert (decode.forward_mode, totals(decode)) == (ForwardMode.DECODE, {CountKind.ROUTED: 2})


def test_mtp_or_draft_model(record: Make) -> None:
    """A second model in the same step has layer numbers behind the first one's, and the report says so."""
    recording, model, draft = record(), Model(2), Model(1)
    recording.tracer.instrument(model)
    report = recording.tracer.instrument(draft)
    assert [layer.layer for layer in report.layers] == [2]
    assert "another instrumented model has the same layer numbers: these layers count from 2" in str(report)
    with recording.tracer.step():
        model(HIDDEN)
        draft(HIDDEN[:3])
    (step,) = recording.records()
    assert [(row.layer, sum(row.counts)) for row in step.experts] == [(0, 10), (1, 10), (2, 6)]
    # On a clock that stands still only exchanges have rows.
    assert [row.layer for row in step.phases if row.phase is Phase.DISPATCH] == [0, 1, 2]


@pytest.mark.parametrize("sentinel", [-1, 2, 100])
def test_sentinel_ids(sentinel: int) -> None:
    """A local id that stands for "not here" is neither this rank's expert nor the next one's."""
    counter = StepCounter([CountSite(0, 6, CountKind.RECEIVED, offset=2, num_local_experts=2)], CPU)
    counter.add(0, torch.tensor([[0], [sentinel], [1]]))
    assert counted(counter) == {CountKind.RECEIVED: (0, 0, 1, 1, 0, 0)}


def test_a_count_says_its_unit() -> None:
    """Kinds never share a row: pairs of the source side and rows of the destination side are told apart."""
    rows = (
        ExpertRow(layer=0, kind=CountKind.ROUTED, counts=(1, 2)),
        ExpertRow(layer=0, kind=CountKind.RECEIVED, counts=(0, 7)),
    )
    (receipt,) = receipts(rows)
    assert (receipt.admitted, receipt.executed) == ((1, 2), (0, 7))
