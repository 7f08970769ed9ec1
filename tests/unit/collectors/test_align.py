"""Clock alignment recovers offset and drift, says how sure it is, and refuses wrong pairs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moetrace_collectors.align import ClockFit, ClockRefused, fit_clock
from moetrace_collectors.model import IntArray

UNIX_NS = 1_700_000_000_000_000_000
SECOND = 1_000_000_000


def shared_ends(count: int, *, span_ns: int, seed: int = 0) -> IntArray:
    """Irregular ends of exchanges by a true clock."""
    random = np.random.default_rng(seed)
    return UNIX_NS + np.sort(random.integers(0, span_ns, count))


def by_clock(
    ends: IntArray, *, offset_ns: int, drift_ppm: float, skew_ns: int = 0, seed: int = 1
) -> IntArray:
    """The same ends by another clock, each up to `skew_ns` apart."""
    since = (ends - ends[0]).astype(np.float64)
    skew = np.random.default_rng(seed).integers(-skew_ns, skew_ns + 1, len(ends))
    return ends + offset_ns + np.rint(since * drift_ppm * 1e-6).astype(np.int64) + skew


def fitted(reference: IntArray, ends: IntArray) -> ClockFit:
    """The fit, which must not be refused."""
    fit = fit_clock(reference, ends)
    assert isinstance(fit, ClockFit)
    return fit


def test_offset_and_drift_come_back_over_a_long_recording() -> None:
    """Ten seconds tell a drift of 50 ppm to a part per million, and times to the release skew."""
    true = shared_ends(400, span_ns=10 * SECOND)
    ends = by_clock(true, offset_ns=-3 * SECOND, drift_ppm=50, skew_ns=3_000)
    fit = fitted(true, ends)
    assert abs(fit.drift_ppm - 50) < 1
    assert np.abs(fit.to_reference(ends) - true).max() <= 5_000
    assert 2_000 < fit.error_ns < 10_000


def test_a_drift_too_small_to_tell_is_not_made_up() -> None:
    """Ten milliseconds with microseconds of skew cannot show 50 ppm, which is half a microsecond."""
    true = shared_ends(10, span_ns=10_000_000)
    ends = by_clock(true, offset_ns=3 * SECOND, drift_ppm=50, skew_ns=3_000)
    fit = fitted(true, ends)
    assert fit.drift_ppm == 0.0
    assert np.abs(fit.to_reference(ends) - true).max() <= fit.error_ns <= 20_000


@given(
    offset=st.integers(-3 * SECOND, 3 * SECOND),
    drift=st.floats(-100, 100),
    seed=st.integers(0, 1_000),
)
def test_the_error_bar_holds(offset: int, drift: float, seed: int) -> None:
    """Whatever the clock, an aligned end is off by no more than the stated error and the skew itself."""
    true = shared_ends(60, span_ns=SECOND, seed=seed)
    ends = by_clock(true, offset_ns=offset, drift_ppm=drift, skew_ns=2_000, seed=seed + 1)
    fit = fitted(true, ends)
    assert np.abs(fit.to_reference(ends) - true).max() <= fit.error_ns + 2_000


def test_a_constant_shift_of_all_clocks_changes_nothing() -> None:
    """Only differences of clocks count."""
    true = shared_ends(30, span_ns=SECOND)
    ends = by_clock(true, offset_ns=12_345, drift_ppm=20, skew_ns=500)
    here, there = fitted(true, ends), fitted(true + 77 * SECOND, ends + 77 * SECOND)
    assert (here.offset_ns, here.error_ns) == (there.offset_ns, there.error_ns)


def test_a_fifth_of_wrong_pairs_is_outvoted() -> None:
    """Some pairs are off by milliseconds; the fit is that of the others, which are counted."""
    true = shared_ends(50, span_ns=SECOND)
    ends = by_clock(true, offset_ns=1_000_000, drift_ppm=0, skew_ns=500)
    ends[::6] += 7_000_000
    fit = fitted(true, ends)
    assert abs(fit.offset_ns - 1_000_000) < 1_000
    assert (fit.pairs, fit.agreeing_pairs) == (50, 41)


def test_pairs_shifted_by_one_are_refused() -> None:
    """The k-th with the (k+1)-th: gaps between exchanges differ, so no clock explains the pairs."""
    true = shared_ends(41, span_ns=SECOND)
    refusal = fit_clock(true[:-1], by_clock(true, offset_ns=0, drift_ppm=0)[1:])
    assert isinstance(refusal, ClockRefused)
    assert refusal.disagree
    assert "of 40 pairs" in refusal.reason


def test_a_drift_that_no_clock_has_is_refused() -> None:
    """Pairs on a line of 1 % drift are pairs of different things."""
    true = shared_ends(20, span_ns=SECOND)
    refusal = fit_clock(true, by_clock(true, offset_ns=0, drift_ppm=10_000))
    assert isinstance(refusal, ClockRefused)
    assert refusal.disagree


def test_two_pairs_prove_nothing() -> None:
    """Two points always lie on a line: too few, which is not the same as a contradiction."""
    true = shared_ends(2, span_ns=SECOND)
    refusal = fit_clock(true, true + 5)
    assert isinstance(refusal, ClockRefused)
    assert not refusal.disagree


def test_ends_at_one_moment_give_an_offset() -> None:
    """Pairs that span no time cannot tell a drift, and do not divide by it."""
    true = np.full(4, UNIX_NS, dtype=np.int64)
    assert fitted(true, true + 9).offset_ns == 9
