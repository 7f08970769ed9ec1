"""Expert load per layer against published right values and the field's definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetrace_collectors.model import ExpertCounts, JoinedStep
from moetrace_collectors.simulate import SimulatedRun, simulate
from moetrace_collectors.summary import layer_loads
from moetrace_schemas.enums import COUNT_KIND_CODE, CountKind, ForwardMode
from verdict_timeline import joined, rank_step

LOADS = Path(__file__).parents[2] / "data" / "loads"
EXPECTED: dict[str, Any] = json.loads((LOADS / "olmoe_mixtral_expected.json").read_text())


def counted(
    *rows: tuple[int, int, CountKind, list[int]], mode: ForwardMode = ForwardMode.TRAIN
) -> JoinedStep:
    """A step of ranks without phases; rows are (rank, layer, kind, counts)."""
    ranks = sorted({row[0] for row in rows})
    records = []
    for rank in ranks:
        record = rank_step(rank, [], ep_size=len(ranks), forward_mode=mode)
        experts = tuple(
            ExpertCounts(layer=layer, kind=COUNT_KIND_CODE[kind], counts=np.array(counts))
            for owner, layer, kind, counts in rows
            if owner == rank
        )
        object.__setattr__(record, "experts", experts)
        records.append(record)
    return joined(*records)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_published_counts_give_the_published_figures(name: str) -> None:
    """max/mean, CV and hot expert of OLMoE and Mixtral, summed over two source ranks."""
    expected = EXPECTED[name]
    rows = []
    for layer, counts in zip(expected["layers"], expected["counts"], strict=True):
        # Split over two ranks as sources: the figures are of their sum.
        first = [count // 3 for count in counts]
        rows.append((0, layer, CountKind.ROUTED, first))
        rows.append((1, layer, CountKind.ROUTED, [c - f for c, f in zip(counts, first, strict=True)]))
    loads = layer_loads(counted(*rows))
    assert [load.layer for load in loads] == expected["layers"]
    for load, figures in zip(loads, expected["per_expert"], strict=True):
        assert load.tokens == figures["total"]
        assert load.max_mean_ratio == pytest.approx(figures["max_over_mean"])
        assert load.cv == pytest.approx(figures["cv_pop"])
        assert load.hot_expert == figures["argmax"]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_rank_imbalance_is_of_rows_received(name: str) -> None:
    """Eight ranks that hold the experts in order: max/mean over ranks as published."""
    expected = EXPECTED[name]["contiguous_ep8"]
    for layer, (loads, figures) in enumerate(zip(expected["rank_loads"], expected["stats"], strict=True)):
        rows = [(rank, layer, CountKind.RECEIVED, [received]) for rank, received in enumerate(loads)]
        rows.append((0, layer, CountKind.ROUTED, [1]))
        (load,) = layer_loads(counted(*rows))
        assert load.rank_max_mean_ratio == pytest.approx(figures["max_over_mean"])


def test_the_definition_in_use_is_max_over_mean_per_layer() -> None:
    """The worked case of the field's definitions: ratios are taken per layer, never over summed layers."""
    case = json.loads((LOADS / "balancedness_definitions.json").read_text())["case"]
    rows = [(0, layer, CountKind.ROUTED, loads) for layer, loads in enumerate(case["load"])]
    assert [load.max_mean_ratio for load in layer_loads(counted(*rows))] == pytest.approx([1.6, 1.6, 1.0])


def test_padding_dropped_and_received_pairs_are_not_routed_ones() -> None:
    """Only kind `routed` counts as tokens; dead experts are those that no token chose."""
    (load,) = layer_loads(
        counted(
            (0, 4, CountKind.ROUTED, [3, 0, 1, 0]),
            (0, 4, CountKind.PADDING, [100, 100, 100, 100]),
            (0, 4, CountKind.DROPPED, [1, 0, 0, 0]),
            (0, 4, CountKind.RECEIVED, [9, 9, 0, 0]),
            (0, 4, CountKind.RECOMPUTE, [3, 0, 1, 0]),
        )
    )
    assert (load.tokens, load.dead_experts, load.hot_expert) == (4, 2, 0)


def test_an_idle_rank_counts_by_what_its_experts_received() -> None:
    """What its dummy batch routed is no load; its experts worked for the others, and as hard as they say."""
    (load,) = layer_loads(
        counted(
            (0, 0, CountKind.ROUTED, [2, 0, 6, 0]),
            (0, 0, CountKind.RECEIVED, [3, 0, 0, 0]),
            (1, 0, CountKind.DUMMY, [2]),
            (1, 0, CountKind.RECEIVED, [0, 0, 7, 0]),
        )
    )
    assert (load.tokens, load.hot_expert, load.rank_max_mean_ratio) == (8, 2, 7 / 5)


def test_a_layer_without_pairs_has_no_ratio() -> None:
    """Nothing is divided by zero, and no imbalance is invented."""
    (load,) = layer_loads(counted((0, 1, CountKind.ROUTED, [0, 0, 0])))
    assert (load.tokens, load.max_mean_ratio, load.cv, load.rank_max_mean_ratio) == (0, 0.0, 0.0, 0.0)
    assert load.dead_experts == 3


def test_prefill_and_decode_are_never_mixed() -> None:
    """Ranks of one step in two modes give two loads per layer."""
    both = joined(
        *counted((0, 0, CountKind.ROUTED, [4, 0]), mode=ForwardMode.PREFILL).rank_steps,
        *counted((1, 0, CountKind.ROUTED, [0, 6]), mode=ForwardMode.DECODE).rank_steps,
    )
    assert [(load.forward_mode, load.tokens) for load in layer_loads(both)] == [
        (ForwardMode.PREFILL, 4),
        (ForwardMode.DECODE, 6),
    ]


def test_rows_received_equal_pairs_routed_in_the_simulator() -> None:
    """What all ranks route arrives somewhere: the two kinds have one sum per layer."""
    step = next(simulate(SimulatedRun())).joined
    for load in layer_loads(step):
        received = sum(
            int(row.counts.sum())
            for record in step.rank_steps
            for row in record.experts
            if row.layer == load.layer and row.kind == COUNT_KIND_CODE[CountKind.RECEIVED]
        )
        assert received == load.tokens
