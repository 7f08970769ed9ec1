"""Figures of uneven load against published and recomputed values, and their invariants."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.arrays import as_loads
from moetrace_collectors.load.balancedness import DEFINITIONS, balancedness_layer, balancedness_sum
from moetrace_collectors.load.expert_map import contiguous_placement
from moetrace_collectors.load.figures import hottest, load_figures
from moetrace_collectors.load.stability import split_windows, stability

LOADS = Path(__file__).parents[2] / "data" / "loads"
EXACT = 1e-9


def read(name: str) -> dict[str, object]:
    """A file of the shared cases."""
    document: dict[str, object] = json.loads((LOADS / name).read_text())
    return document


ESFT_COUNTS = np.array(read("esft_law_counts.json")["counts"], dtype=np.float64)
ESFT = read("esft_law_expected.json")
MODELS = read("olmoe_mixtral_expected.json")


def check(figures: object, expected: list[dict[str, float]]) -> None:
    """Every figure that the expected values tell, layer by layer."""
    for name, key in (
        ("total", "total"),
        ("max_mean_ratio", "max_over_mean"),
        ("cv", "cv_pop"),
        ("gini", "gini"),
        ("entropy_bits", "entropy_bits"),
    ):
        assert getattr(figures, name) == pytest.approx([layer[key] for layer in expected], abs=EXACT), name


@pytest.mark.parametrize("name", list(MODELS))
def test_figures_of_real_models(name: str) -> None:
    """OLMoE and Mixtral on two domains: every figure to 1e-9."""
    expected = MODELS[name]
    counts = np.array(expected["counts"], dtype=np.float64)  # type: ignore[index]
    check(load_figures(counts), expected["per_expert"])  # type: ignore[index]
    assert hottest(counts, 1)[:, 0].tolist() == [x["argmax"] for x in expected["per_expert"]]  # type: ignore[index]


def test_figures_of_a_recorded_run() -> None:
    """26 layers over 33 steps: every figure to 1e-9, shares to the published 4 decimals."""
    totals = ESFT_COUNTS.sum(axis=0)
    check(load_figures(totals), ESFT["per_layer"])  # type: ignore[arg-type]
    published = read("esft_law_published_summary.json")["token_scores"]
    shares = totals / totals.sum(axis=1, keepdims=True)
    for layer, experts in published.items():  # type: ignore[attr-defined]
        assert shares[int(layer) - 1] == pytest.approx(list(experts.values()), abs=5e-5)


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_rank_loads_and_balance_of_a_recorded_run(ranks: int) -> None:
    """Rank loads, critical ranks and balance of experts in order on 4, 8 and 16 ranks."""
    expected = ESFT[f"contiguous_ep{ranks}"]
    placement = contiguous_placement(num_layers=26, num_experts=64, num_slots=64, num_ranks=ranks)
    by_step = placement.rank_loads(ESFT_COUNTS)
    totals = by_step.sum(axis=0)
    assert totals.tolist() == expected["rank_loads"]  # type: ignore[index]
    assert balancedness_layer(totals) == pytest.approx(expected["balancedness"], abs=EXACT)  # type: ignore[index]
    assert balancedness_sum(totals) == pytest.approx(expected["vllm_style"], abs=EXACT)  # type: ignore[index]
    assert totals.argmax(axis=1).tolist() == expected["critical_rank_per_layer"]  # type: ignore[index]
    assert by_step.max(axis=2).sum() == expected["sum_over_steps_of_max"]  # type: ignore[index]
    assert by_step.mean(axis=2).sum() == expected["sum_over_steps_of_mean"]  # type: ignore[index]


def test_definitions_of_balancedness_disagree_as_published() -> None:
    """The worked case: ranks are reduced first; reducing over layers first gives the known wrong value."""
    shared = read("balancedness_definitions.json")
    case = shared["case"]
    loads = np.array(case["load"], dtype=np.float64)  # type: ignore[index]
    placement = contiguous_placement(num_layers=3, num_experts=4, num_slots=4, num_ranks=case["ranks"])  # type: ignore[index]
    by_rank = placement.rank_loads(loads)
    assert by_rank.mean(axis=1).sum() == case["mean_rank_load_sum"]  # type: ignore[index]
    assert by_rank.max(axis=1).sum() == case["max_rank_load_sum"]  # type: ignore[index]
    right = case["balancedness_sum"]  # type: ignore[index]
    assert DEFINITIONS["balancedness_sum"].value(by_rank) == pytest.approx(right, abs=EXACT)
    assert DEFINITIONS["max_mean_ratio"].value(by_rank) == pytest.approx((1.4 + 1.4 + 1.0) / 3)
    assert DEFINITIONS["balancedness_mean"].value(by_rank) == pytest.approx((2 / 1.4 + 1) / 3)
    assert DEFINITIONS["imbalance_ratio"].value(by_rank) == pytest.approx(0.8 / 3)
    wrong = by_rank.T.mean(axis=1).sum() / by_rank.T.max(axis=1).sum()
    assert wrong == pytest.approx(case["wrong_value_if_reduced_over_layers_first"], abs=EXACT)  # type: ignore[index]


def test_layers_without_load_are_in_no_average() -> None:
    """An empty layer is neither perfect nor broken; a recording of empty layers has no balance."""
    loads = np.array([[4.0, 0.0], [0.0, 0.0]])
    assert DEFINITIONS["balancedness_mean"].value(loads) == 0.5
    assert DEFINITIONS["max_mean_ratio"].value(loads) == 2.0
    assert all(math.isnan(definition.value(loads[1:])) for definition in DEFINITIONS.values())
    figures = load_figures(loads)
    assert figures.max_mean_ratio.tolist() == [2.0, 0.0]
    assert figures.entropy_bits.tolist() == [0.0, 0.0]
    assert figures.dead.tolist() == [1, 2]


@given(arrays(np.int64, (3, 7), elements=st.integers(0, 10**6)))
def test_figures_stay_in_their_ranges(counts: np.ndarray) -> None:
    """Whatever is counted: 1 <= max/mean <= n, 0 <= gini < 1, 0 <= entropy <= log2 n; scale is nothing."""
    loads = counts.astype(np.float64)
    figures, scaled = load_figures(loads), load_figures(1000.0 * loads)
    used = figures.total > 0
    assert (figures.max_mean_ratio[used] >= 1.0 - 1e-12).all()
    assert (figures.max_mean_ratio <= 7.0 + 1e-12).all()
    assert ((figures.gini >= 0.0) & (figures.gini <= 1.0 - 1 / 7 + 1e-12)).all()
    assert ((figures.entropy_bits >= 0.0) & (figures.entropy_bits <= math.log2(7) + 1e-12)).all()
    for name in ("max_mean_ratio", "cv", "gini", "entropy_bits"):
        assert getattr(scaled, name) == pytest.approx(getattr(figures, name), abs=1e-9), name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [[1.0, float("nan")]],
            "loads[step 0, layer 0, expert 1] = nan: a finite load of 0 or more expected",
        ),
        ([[1.0], [-2.0]], "loads[step 0, layer 1, expert 0] = -2: a finite load of 0 or more expected"),
        ([[float("inf")]], "= inf: a finite load of 0 or more expected"),
        ([1.0, 2.0], "loads of shape [2]: [layers, experts] or [steps, layers, experts] expected"),
        ([[]], "with at least one of each"),
        ([["a"]], "numbers as [layers, experts]"),
    ],
)
def test_what_is_no_load_is_named(values: object, message: str) -> None:
    """A broken load is one line with its place, its value and the fix."""
    with pytest.raises(UsageError) as caught:
        as_loads(values)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hot_expert_that_stays_is_stable_and_a_burst_is_not() -> None:
    """The same max/mean in every window, in one layer by one expert, in the other by changing ones."""
    random = np.random.default_rng(0)
    windows = random.poisson(1000.0, (8, 3, 16)).astype(np.float64)
    windows[:, 0, 5] *= 8.0
    for window in range(8):
        windows[window, 1, (3 * window) % 16] *= 8.0
    found = stability(windows, hot_set_size=4)
    assert found.kind == ("stable", "transient", "even")
    assert found.persistent_share[0] > 0.95
    assert found.persistent_share[1] < 0.05
    assert found.persistent_share[2] < 0.2
    assert found.hottest_share[0] == 1.0
    assert found.hottest_share[1] == pytest.approx(1 / 8)
    assert found.hot_set_overlap[0] > found.hot_set_overlap[1]


def test_stability_of_a_recorded_run() -> None:
    """Legal text is one topic: nearly all of its imbalance is there again in the next window."""
    found = stability(split_windows(ESFT_COUNTS, 8))
    assert set(found.kind) == {"stable"}
    assert found.persistent_share.min() > 0.8
    assert (np.abs(found.rank_correlation) <= 1.0).all()


def test_one_window_tells_nothing_about_time() -> None:
    """No invented zeros: unknown stays unknown."""
    found = stability(ESFT_COUNTS[:1])
    assert set(found.kind) == {"unknown"}
    assert np.isnan(found.persistent_share).all()


@given(st.integers(1, 40), st.integers(1, 50))
def test_windows_keep_every_step_once(steps: int, count: int) -> None:
    """Windows are consecutive and lose nothing, however steps divide."""
    loads = np.arange(steps, dtype=np.float64)[:, None, None] + 1.0
    windows = split_windows(loads, count)
    assert len(windows) == min(steps, count)
    assert windows.sum() == loads.sum()
