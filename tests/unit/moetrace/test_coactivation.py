"""Co-activation: pairs of experts counted on the device are those of a loop over tokens, in fixed memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import nn

from moetrace.adapters.reference import ReferenceMoE
from moetrace.emit.wire import span_attributes
from moetrace.instrument.coactivation import MOST_CELLS, CoactivationSampler
from moetrace.instrument.routing import StepCounter, padding_flags
from moetrace.record.count_sites import CountSite
from moetrace.record.types import CoactivationRow
from moetrace_schemas import attributes
from moetrace_schemas.columns import COACTIVATION, unpack
from moetrace_schemas.enums import CoactivationSpan, CountKind

from .conftest import Recording
from .records import CONTEXT, step_record

Make = Callable[..., Recording]
CPU = torch.device("cpu")
Pairs = dict[tuple[int, CoactivationSpan], dict[tuple[int, int], int]]


def by_loop(routes: Sequence[torch.Tensor], num_experts: int, real: Sequence[bool] | None = None) -> Pairs:
    """The specification: for every token, every pair of its slots, and every pair with the next layer's."""
    result: dict[tuple[int, CoactivationSpan], Counter[tuple[int, int]]] = {}
    for layer, ids in enumerate(routes):
        for token, row in enumerate(ids.tolist()):
            if real is not None and not real[token]:
                continue
            here = [expert for expert in row if 0 <= expert < num_experts]
            within = result.setdefault((layer, CoactivationSpan.WITHIN), Counter())
            within.update((min(p), max(p)) for p in combinations(here, 2) if p[0] != p[1])
            if layer + 1 < len(routes):
                following = [e for e in routes[layer + 1][token].tolist() if 0 <= e < num_experts]
                result.setdefault((layer, CoactivationSpan.ACROSS), Counter()).update(
                    product(here, following)
                )
    return {key: dict(pairs) for key, pairs in result.items() if pairs}


def as_pairs(rows: Sequence[CoactivationRow]) -> Pairs:
    """Rows in the same shape."""
    return {(row.layer, row.span): {(a, b): tokens for a, b, tokens in row.pairs} for row in rows}


def sampled(
    routes: Sequence[torch.Tensor], num_experts: int, *, layers: int = 9, turn: int = 0
) -> StepCounter:
    """A counter that has seen one forward."""
    sites = [CountSite(layer, num_experts) for layer in range(len(routes))]
    sampler = CoactivationSampler(sites, CPU, layers=layers)
    for _ in range(turn):
        assert sampler.take() is not None
        sampler.release()
    counter = StepCounter(sites, CPU)
    counter.begin(checking=False, coactivation=sampler.take())
    return counter


def routes_of(*, layers: int, tokens: int, top_k: int, num_experts: int, seed: int = 0) -> list[torch.Tensor]:
    """Routes with a few ids that are no expert."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(layers):
        ids = torch.rand(tokens, num_experts, generator=generator).topk(top_k).indices
        ids[torch.rand(tokens, top_k, generator=generator) < 0.1] = -1
        found.append(ids)
    return found


@pytest.mark.parametrize(
    ("layers", "tokens", "top_k", "num_experts"),
    [(1, 7, 2, 4), (3, 50, 3, 6), (4, 64, 8, 16), (2, 0, 2, 4), (3, 5, 1, 4)],
)
def test_pairs_are_those_of_a_loop_over_tokens(
    layers: int, tokens: int, top_k: int, num_experts: int
) -> None:
    """Within a layer each pair once, across layers in order; ids that are no expert pair with nothing."""
    routes = routes_of(layers=layers, tokens=tokens, top_k=top_k, num_experts=num_experts)
    counter = sampled(routes, num_experts)
    for layer, ids in enumerate(routes):
        counter.add(layer, ids)
    counter.finish()
    assert as_pairs(counter.coactivation_rows()) == by_loop(routes, num_experts)


def test_padding_pairs_with_nothing() -> None:
    """Real tokens only."""
    routes = routes_of(layers=2, tokens=6, top_k=2, num_experts=4)
    real = [True, False, True, True, False, False]
    counter = sampled(routes, 4)
    counter.padding = padding_flags(torch.tensor([real]).long())
    for layer, ids in enumerate(routes):
        counter.add(layer, ids)
    counter.finish()
    assert as_pairs(counter.coactivation_rows()) == by_loop(routes, 4, real)


def test_a_mask_pairs_like_the_ids_that_it_stands_for() -> None:
    """Routers that return a mask [T, E] say how many experts a token has."""
    routes = [torch.rand(20, 6, generator=torch.Generator().manual_seed(1)).topk(2).indices for _ in range(2)]
    sites = [CountSite(layer, 6, slots=2) for layer in range(2)]
    counter = StepCounter(sites, CPU)
    counter.begin(checking=False, coactivation=CoactivationSampler(sites, CPU, layers=2).take())
    for layer, ids in enumerate(routes):
        counter.add_mask(layer, torch.zeros(20, 6, dtype=torch.bool).scatter_(1, ids, value=True), 40)
    counter.finish()
    assert as_pairs(counter.coactivation_rows()) == by_loop(routes, 6)


def test_layers_take_turns() -> None:
    """Two layers at a time: the first sample has layers 0 and 1, the next has 2, and then it starts anew."""
    routes = routes_of(layers=3, tokens=30, top_k=2, num_experts=4)
    everything = by_loop(routes, 4)
    for turn, layers in enumerate([(0, 1), (2,), (0, 1)]):
        counter = sampled(routes, 4, layers=2, turn=turn)
        for layer, ids in enumerate(routes):
            counter.add(layer, ids)
        counter.finish()
        expected = {key: pairs for key, pairs in everything.items() if key[0] in layers}
        assert as_pairs(counter.coactivation_rows()) == expected


def test_forwards_of_one_step_add_up_and_do_not_mix() -> None:
    """Another number of tokens is another forward; its layers pair among themselves."""
    first = routes_of(layers=2, tokens=5, top_k=2, num_experts=4)
    second = routes_of(layers=2, tokens=8, top_k=2, num_experts=4, seed=3)
    counter = sampled(first, 4)
    for routes in (first, second):
        for layer, ids in enumerate(routes):
            counter.add(layer, ids)
    counter.finish()
    one, other = by_loop(first, 4), by_loop(second, 4)
    both = {key: dict(Counter(one.get(key, {})) + Counter(other.get(key, {}))) for key in one | other}
    assert as_pairs(counter.coactivation_rows()) == both


def test_only_one_sample_is_under_way() -> None:
    """Memory is that of one accumulator: a sample that is not read yet makes the next one wait."""
    sites = [CountSite(0, 4)]
    sampler = CoactivationSampler(sites, CPU, layers=1)
    counter = StepCounter(sites, CPU)
    counter.begin(checking=False, coactivation=sampler.take())
    assert sampler.take() is None
    counter.finish()
    counter.coactivation_rows()
    assert sampler.take() is sampler
    # A step that was dropped gives it back when its buffer is used again.
    counter.begin(checking=False, coactivation=sampler)
    counter.begin(checking=False)
    assert sampler.take() is sampler


def test_what_does_not_fit_is_not_sampled(caplog: pytest.LogCaptureFixture) -> None:
    """Fewer layers at a time, or, where one is too large, none; that is said."""
    experts = int((MOST_CELLS / 5) ** 0.5)
    sites = [CountSite(layer, experts) for layer in range(4)]
    sampler = CoactivationSampler(sites, torch.device("meta"), layers=4)
    assert sampler._cells.numel() <= MOST_CELLS
    assert [len(turn.within) for turn in sampler._turns] == [2, 2]
    with caplog.at_level(logging.WARNING, "moetrace"):
        too_large = CoactivationSampler([CountSite(0, 8192)], CPU, layers=1)
    assert too_large.take() is None
    assert "co-activation is off" in caplog.text


class Model(nn.Module):
    """Two reference layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ReferenceMoE(8, 16, num_experts=6, top_k=2) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def test_a_models_pairs_are_those_of_its_routers(record: Make) -> None:
    """Every second recorded step; the others carry none, and all are counted as ever."""
    model, chosen = Model(), []
    for layer in model.layers:
        plain = layer.route

        def route(tokens: torch.Tensor, plain: Callable[..., Any] = plain) -> Any:
            weights, ids = plain(tokens)
            chosen.append(ids.clone())
            return weights, ids

        layer.route = route
    recording = record(coactivation_steps=2)
    recording.tracer.instrument(model)
    generator = torch.Generator().manual_seed(0)
    for number in range(4):
        model(torch.randn(9, 8, generator=generator))
        recording.emitter.wait_for(number + 1)
    steps = recording.records()
    for number, step in enumerate(steps):
        routes = chosen[2 * number : 2 * number + 2]
        assert as_pairs(step.coactivation) == ({} if number % 2 else by_loop(routes, 6))
        routed = [row for row in step.experts if row.kind is CountKind.ROUTED]
        assert [sum(row.counts) for row in routed] == [18, 18]
    assert recording.tracer.guard.errors == {}


def test_off_is_the_default(record: Make) -> None:
    """Nothing is allocated and nothing sent."""
    recording, model = record(), Model()
    recording.tracer.instrument(model)
    model(torch.randn(9, 8))
    (step,) = recording.records()
    assert step.coactivation == ()
    assert recording.tracer._buffers.coactivation is None


def test_pairs_travel_as_flat_columns() -> None:
    """One row per pair that occurred."""
    row = CoactivationRow(layer=7, span=CoactivationSpan.ACROSS, pairs=((0, 3, 5), (2, 2, 1)))
    sent = span_attributes(
        step_record(coactivation=(row,)), CONTEXT, sample_period=1, model_name="", model_version=""
    )
    block = sent[attributes.COLUMNS_COACTIVATION]
    assert isinstance(block, bytes)
    columns, _ = unpack(COACTIVATION, block)
    assert {name: list(values) for name, values in columns.items()} == {
        "layer": [7, 7],
        "span": [1, 1],
        "first": [0, 2],
        "second": [3, 2],
        "count": [5, 1],
    }
