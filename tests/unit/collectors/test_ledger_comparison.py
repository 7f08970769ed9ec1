"""Before and after a change: regressions are found, noise is not called one, and few steps decide nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors.ledger.comparison import MIN_STEPS, Comparison, Thresholds, compare, match_sizes
from moetrace_collectors.ledger.resampling import interval_of, relative, weighted_quantile
from moetrace_collectors.ledger.samples import RequestSamples, Side, StepSamples, at_the_same_time
from moetrace_schemas.enums import ChangeVerdict

SPREAD = 0.1
"""Log-normal sigma of step times in these tests."""


def steps(random: np.random.Generator, count: int, *, factor: float = 1.0, **changes: Any) -> StepSamples:
    """Steps of 10 ms with noise; 1,000 rows each unless told otherwise."""
    rows = np.broadcast_to(np.asarray(changes.pop("rows", 1000.0), dtype=float), (count,)).copy()
    values: dict[str, Any] = {
        "step": np.arange(count),
        "time_ns": np.arange(count) * 10_000_000,
        "step_ns": 1e7 * factor * rows / 1000.0 * random.lognormal(0.0, SPREAD, count),
        "rows": rows,
        "pairs": rows,
        "lost_pairs": np.zeros(count),
        "sent_rows": rows,
        "cross_rows": rows / 2,
        **changes,
    }
    return StepSamples(**values)


def side(version: int, samples: StepSamples, mode: str = "decode", **more: Any) -> Side:
    """A side of one forward mode."""
    return Side(label=f"version {version}", version=version, steps={mode: samples}, **more)


def judged(seed: int, count: int, factor: float, limits: Thresholds | None = None) -> Comparison:
    """So many steps on each side, those after slower by a factor."""
    random = np.random.default_rng(seed)
    return compare(
        side(1, steps(random, count)), side(2, steps(random, count, factor=factor)), limits, seed=seed
    )


@given(st.integers(0, 2**32 - 1), st.integers(400, 800))
@settings(max_examples=8, deadline=None)
def test_a_fifth_slower_over_enough_steps_regressed(seed: int, count: int) -> None:
    """And the answer says where to roll back to, and what was exceeded."""
    result = judged(seed, count, 1.2)
    assert result.verdict is ChangeVerdict.REGRESSED
    assert result.rollback_version == 1
    assert result.sentence.startswith("regressed -> roll back to version 1; decode: step_p95 changed by +")


@given(st.integers(0, 2**32 - 1), st.integers(400, 800))
@settings(max_examples=8, deadline=None)
def test_without_a_difference_enough_steps_are_accepted(seed: int, count: int) -> None:
    """The interval lies below the threshold."""
    result = judged(seed, count, 1.0)
    assert (result.verdict, result.rollback_version) == (ChangeVerdict.ACCEPTED, None)


@pytest.mark.parametrize("is_correlated", [False, True])
def test_noise_is_called_a_regression_no_more_often_than_the_interval_says(is_correlated: bool) -> None:
    """With a threshold of 0, an interval of 95 % lies above it by chance in 2.5 % of comparisons.

    The bootstrap of a tail is a little too narrow, more so where steps resemble their neighbours: 5 % and 10
    % are held. With the default threshold of 10 % it never happens here.
    """
    trials, count, wrong, wrong_by_default = 100, 200, 0, 0
    for seed in range(trials):
        random = np.random.default_rng(seed)
        sides = []
        for version in (1, 2):
            noise = random.normal(0.0, SPREAD, count)
            if is_correlated:
                for at in range(1, count):
                    noise[at] = 0.5 * noise[at - 1] + noise[at]
            sides.append(side(version, steps(random, count, step_ns=1e7 * np.exp(noise))))
        result = compare(*sides, Thresholds(max_slowdown=0.0), seed=seed)
        wrong += result.verdict is ChangeVerdict.REGRESSED
        p95 = next(figure for figure in result.modes[0].figures if figure.name == "step_p95")
        wrong_by_default += p95.change.low > Thresholds().max_slowdown
    assert wrong <= trials * (0.10 if is_correlated else 0.05)
    assert wrong_by_default == 0


@given(st.integers(0, 2**32 - 1), st.integers(1, MIN_STEPS - 1), st.floats(1.0, 3.0))
@settings(max_examples=8, deadline=None)
def test_few_steps_decide_nothing(seed: int, count: int, factor: float) -> None:
    """However slow they are; the reason says how many are needed."""
    result = judged(seed, count, factor)
    assert result.verdict is ChangeVerdict.NOT_ENOUGH_EVIDENCE
    assert f"{MIN_STEPS} of each needed" in result.sentence


def test_an_interval_across_the_threshold_decides_nothing() -> None:
    """A change right at the threshold, and noise: neither accepted nor regressed."""
    result = judged(3, 100, 1.1)
    assert result.verdict is ChangeVerdict.NOT_ENOUGH_EVIDENCE
    assert "on both sides of the threshold of +10.0 %" in result.sentence


def test_the_same_steps_give_the_same_answer() -> None:
    """Resampling is seeded: a verdict can be repeated by whoever doubts it."""
    assert judged(1, 200, 1.05) == judged(1, 200, 1.05)


def test_larger_steps_after_a_change_are_no_regression() -> None:
    """Steps grow with their rows; only like is compared with like, in the mix of after."""
    random = np.random.default_rng(0)
    before = steps(random, 800, rows=random.choice([1000.0, 2000.0], 800, p=[0.8, 0.2]))
    after = steps(random, 800, rows=random.choice([1000.0, 2000.0], 800, p=[0.2, 0.8]))
    plain = np.median(after.step_ns) / np.median(before.step_ns)
    result = compare(side(1, before), side(2, after))
    assert plain > 1.5
    assert result.verdict is ChangeVerdict.ACCEPTED
    median = result.modes[0].figures[0]
    assert (median.name, abs(median.change.estimate) < 0.05) == ("step_p50", True)


def test_sizes_without_a_like_are_not_compared() -> None:
    """A traffic that changed with the placement is said to have changed."""
    random = np.random.default_rng(0)
    result = compare(
        side(1, steps(random, 300)),
        side(2, steps(random, 300, rows=np.where(np.arange(300) < 100, 1000.0, 5000.0))),
    )
    assert result.verdict is ChangeVerdict.NOT_ENOUGH_EVIDENCE
    assert "only 100 of 300 steps after the change have like ones before it" in result.sentence


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.lists(st.floats(0, 1e6), min_size=1, max_size=40)
)
def test_weights_give_before_the_mix_of_after(before: list[float], after: list[float]) -> None:
    """Both sides have the same total weight, and a step without a like one has none."""
    weights = match_sizes(np.array(before), np.array(after))
    assert weights[0].sum() == pytest.approx(weights[1].sum())
    assert set(np.unique(weights[1])) <= {0.0, 1.0}


def test_forward_modes_are_not_mixed_and_the_worst_one_counts() -> None:
    """A prefill that got faster does not buy a decode that got slower."""
    random = np.random.default_rng(0)
    before = Side(
        label="version 1",
        version=1,
        steps={"prefill": steps(random, 400), "decode": steps(random, 400)},
    )
    after = Side(
        label="version 2",
        version=2,
        steps={"prefill": steps(random, 400, factor=0.5), "decode": steps(random, 400, factor=1.4)},
    )
    result = compare(before, after)
    assert {mode.name: mode.verdict for mode in result.modes} == {
        "decode": ChangeVerdict.REGRESSED,
        "prefill": ChangeVerdict.ACCEPTED,
    }
    assert result.verdict is ChangeVerdict.REGRESSED


def test_lost_pairs_regress_by_points() -> None:
    """Three points more of dropped pairs is over the default of two, though no step is slower."""
    random = np.random.default_rng(0)
    after = steps(random, 400, lost_pairs=np.full(400, 31.0))
    result = compare(side(1, steps(random, 400)), side(2, after))
    assert result.verdict is ChangeVerdict.REGRESSED
    assert "error_rate changed by +3.0 points" in result.sentence


def test_requests_decide_too() -> None:
    """Time to first token and failed requests, where serving records exist."""
    random = np.random.default_rng(0)

    def requests(ttft: float, failed: float) -> RequestSamples:
        return RequestSamples(
            ttft_ms=ttft * random.lognormal(0, SPREAD, 500),
            tpot_ms=np.full(500, np.nan),
            failed=(random.random(500) < failed).astype(float),
        )

    def answer(ttft: float, failed: float) -> Comparison:
        return compare(
            side(1, steps(random, 400), requests=requests(100.0, 0.01)),
            side(2, steps(random, 400), requests=requests(ttft, failed)),
        )

    assert answer(100.0, 0.01).verdict is ChangeVerdict.ACCEPTED
    assert "ttft_p95" in answer(150.0, 0.01).sentence
    assert "requests: error_rate" in answer(100.0, 0.10).sentence
    assert [figure.name for figure in answer(100.0, 0.01).modes[1].figures] == [
        "ttft_p50", "ttft_p95", "error_rate",
    ]  # fmt: skip


def test_a_canary_is_compared_over_the_time_that_both_ran() -> None:
    """Steps from before the canary was there would compare two times of day."""
    random = np.random.default_rng(0)
    early = steps(random, 400, time_ns=np.arange(400))
    late = steps(random, 400, time_ns=np.arange(400) + 300)
    one, other = at_the_same_time(side(1, early), side(2, late))
    assert (one.steps["decode"].time_ns[0], one.steps["decode"].time_ns[-1]) == (300, 399)
    assert len(other.steps["decode"]) == 100
    assert (one.left_out, other.left_out) == (300, 300)


@settings(deadline=None)
@given(
    st.lists(st.floats(1, 1e3), min_size=1, max_size=30),
    st.integers(0, 4),
    st.sampled_from([0.1, 0.5, 0.95, 1.0]),
)
def test_whole_weights_are_repeated_values(values: list[float], weight: int, quantile: float) -> None:
    """A weighted quantile is the quantile of the list with each value as often as its weight says."""
    weights = np.array([(weight + at) % 5 + 1 for at in range(len(values))])
    repeated = np.sort(np.repeat(values, weights))
    expected = repeated[int(np.ceil(quantile * len(repeated) - 1e-9)) - 1]
    found = weighted_quantile(np.array(values), quantile)(weights[np.newaxis].astype(float))
    assert found[0] == expected


def test_the_interval_covers_what_it_says() -> None:
    """The true change of a median lies within 95 % intervals in some 95 of 100 draws."""
    hits = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        sides = [random.lognormal(0.0, 0.3, 200), 1.1 * random.lognormal(0.0, 0.3, 200)]
        found = interval_of(
            weighted_quantile(sides[0], 0.5),
            weighted_quantile(sides[1], 0.5),
            weights_before=np.ones(200),
            weights_after=np.ones(200),
            combine=relative,
            confidence=0.95,
            seed=seed,
        )
        hits += found.low <= 0.1 <= found.high
    assert 180 <= hits <= 199
