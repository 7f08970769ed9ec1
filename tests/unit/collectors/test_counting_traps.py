"""Traps of the figures that are made of counts; those of counting are in tests/unit/moetrace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moetrace_collectors.decode import decode
from moetrace_collectors.load.balancedness import balancedness_mean, balancedness_sum
from moetrace_collectors.model import ExpertCounts, JoinedStep, RankStep
from moetrace_collectors.sinks.clickhouse_columns import expert_loads
from moetrace_collectors.summary import layer_loads
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas.enums import COUNT_KIND_CODE, ClosedBy, CountKind, ForwardMode

RUN = SyntheticRun(world_size=2, num_layers=2, num_experts=4)


def joined(*rank_steps: RankStep) -> JoinedStep:
    """A step of these ranks."""
    return JoinedStep(
        run_id=RUN.run_id,
        step=0,
        world_size=2,
        rank_steps=rank_steps,
        missing_ranks=(),
        closed_by=ClosedBy.COMPLETE,
    )


def with_routed(step: RankStep, *layers: list[int]) -> RankStep:
    """The rank's step with these pairs per layer."""
    kind = COUNT_KIND_CODE[CountKind.ROUTED]
    counts = [ExpertCounts(layer=at, kind=kind, counts=np.array(pairs)) for at, pairs in enumerate(layers)]
    return replace(step, experts=tuple(counts))


def test_averages_hide_skew() -> None:
    """Two layers that are skewed to opposite sides are even on average; each is shown by itself."""
    first, second = RUN.step(0)
    loads = layer_loads(joined(with_routed(first, [8, 0, 0, 0], [0, 8, 8, 8]), with_routed(second)))
    assert [load.max_mean_ratio for load in loads] == [4.0, pytest.approx(4 / 3)]
    assert [load.hot_expert for load in loads] == [0, 1]


def test_ranks_that_are_skewed_to_opposite_sides_are_one_even_layer() -> None:
    """Experts are shared by all ranks, so their load is the sum, and not a mean of ratios of ranks."""
    first, second = RUN.step(0)
    (load,) = layer_loads(joined(with_routed(first, [8, 0, 0, 0]), with_routed(second, [0, 8, 8, 8])))
    assert load.max_mean_ratio == 1.0


def test_prefill_and_decode_are_never_one_figure() -> None:
    """Ranks in different modes give one load for each."""
    first, second = RUN.step(0)
    loads = layer_loads(
        joined(
            replace(with_routed(first, [4, 0, 0, 0]), forward_mode=ForwardMode.PREFILL),
            replace(with_routed(second, [1, 1, 1, 1]), forward_mode=ForwardMode.DECODE),
        )
    )
    assert {load.forward_mode: load.max_mean_ratio for load in loads} == {
        ForwardMode.PREFILL: 4.0,
        ForwardMode.DECODE: 1.0,
    }


def test_balancedness_has_several_definitions() -> None:
    """They disagree on the same loads, so each is told under its own name, beside raw maximum and mean."""
    rank_loads = np.array([[30.0, 10.0], [1.0, 1.0]])
    assert balancedness_mean(rank_loads) == pytest.approx((20 / 30 + 1) / 2)
    assert balancedness_sum(rank_loads) == pytest.approx(21 / 31)


def test_pairs_by_slot_are_beside_those_by_expert() -> None:
    """More slots than experts survive the wire, as rows of their own kind; load is by expert as before."""
    first, second = RUN.step(0)
    physical = ExpertCounts(
        layer=0, kind=COUNT_KIND_CODE[CountKind.PHYSICAL], counts=np.array([2, 0, 1, 3, 0, 5])
    )
    sent = replace(first, experts=(*first.experts, physical))
    (got,) = decode(request([sent]), max_world_size=1024).rank_steps
    assert layer_loads(joined(got, second)) == layer_loads(joined(first, second))
    stored = expert_loads([got]).arrow.to_pylist()
    slots = {row["expert"]: row["count"] for row in stored if row["count_kind"] == CountKind.PHYSICAL}
    assert slots == {0: 2, 2: 1, 3: 3, 5: 5}
