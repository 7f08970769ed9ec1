"""Clocks of ranks against each other, from the ends of exchanges that they share. Pure; for drawing only.

No verdict reads a clock. To draw ranks on one line all the same, each rank's clock is compared with a
reference rank's: an exchange ends together on all of its ranks, so the difference of the two ends is
what the clocks differ by, plus how far apart the exchange really released them (microseconds)::

    reference   |~~~ wait ~~~|= transfer =|            end at  1 000
    rank        |====== work |= transfer =|            end at  4 002   by its own clock: 3 002 ahead

    difference of ends = offset + drift x time since `reference_ns` + release skew

Ends must be paired by the caller by key and ordinal. Pairs can still be wrong (a sampled trace may pair
the k-th with another k-th), so the fit is robust and must explain nearly all pairs: where it does not,
the clock is refused and nothing is moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import FloatArray, IntArray

LEAST_PAIRS = 3
"""Two pairs always lie on a line; the third can disagree."""
TOLERANCE_NS = 100_000
"""Pairs agree when they lie this close to the fit: the release skew within and between nodes, with room."""
AGREEING_SHARE = 0.8
"""Of the pairs, this share or more must agree."""
MAX_DRIFT = 1e-3
"""Clocks of computers differ by up to some hundred parts per million; more is a wrong pairing."""
SURE_DRIFT = 4.0
"""A drift is used where it is this many of its standard errors from zero; below, it is noise."""
_MAX_SLOPE_PAIRS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFit:
    """A rank's clock: what to take off its times to read them by the reference rank's clock."""

    offset_ns: int
    """Rank's clock minus the reference rank's, at `reference_ns`."""
    drift_ppm: float
    """How much faster the rank's clock runs, parts per million; 0.0 where too small to be told."""
    error_ns: int
    """Bound on the error of an aligned time inside the time that the pairs span."""
    reference_ns: int
    """By the rank's own clock: the middle of the pairs."""
    pairs: int
    agreeing_pairs: int

    def to_reference(self, times_ns: IntArray) -> IntArray:
        """Times by the rank's clock as times by the reference rank's clock."""
        drift = self.drift_ppm * 1e-6
        since = (times_ns - self.reference_ns).astype(np.float64)
        moved: IntArray = times_ns - self.offset_ns - np.rint(since * drift / (1 + drift)).astype(np.int64)
        return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRefused:
    """The pairs do not say what the clocks differ by."""

    reason: str
    """For people, as the rest of a sentence."""
    disagree: bool
    """True where there are pairs and they contradict each other; False where there are too few."""


SAME_CLOCK = ClockFit(offset_ns=0, drift_ppm=0.0, error_ns=0, reference_ns=0, pairs=0, agreeing_pairs=0)
"""The reference rank against itself."""


def fit_clock(
    reference_ends_ns: IntArray, ends_ns: IntArray, *, tolerance_ns: int = TOLERANCE_NS
) -> ClockFit | ClockRefused:
    """Compare two ranks' clocks.

    Args:
        reference_ends_ns: Ends of the shared exchanges by the reference rank's clock.
        ends_ns: Ends of the same exchanges, in the same order, by the rank's clock.
        tolerance_ns: How far from the fit a pair may lie and still agree.
    """
    count = len(ends_ns)
    differences = ends_ns - reference_ends_ns
    if count < LEAST_PAIRS:
        return ClockRefused(reason=f"{count} shared exchanges, at least {LEAST_PAIRS} needed", disagree=False)
    base = int(np.median(differences))
    # Small numbers from here on: float64 is exact for them to far below a nanosecond.
    offset: FloatArray = (differences - base).astype(np.float64)
    middle = int((int(reference_ends_ns.min()) + int(reference_ends_ns.max())) // 2)
    since: FloatArray = (reference_ends_ns - middle).astype(np.float64)

    drift = _slope(since, offset)
    residual = _residual(since, offset, drift)
    if abs(drift) < SURE_DRIFT * _slope_error(since, residual):
        drift = 0.0
        residual = _residual(since, offset, drift)
    agree = np.abs(residual) <= tolerance_ns
    if agree.mean() < AGREEING_SHARE or int(agree.sum()) < LEAST_PAIRS:
        return ClockRefused(
            reason=(
                f"only {int(agree.sum())} of {count} pairs of exchange ends agree within "
                f"{tolerance_ns / 1000:.0f} us"
            ),
            disagree=True,
        )
    if abs(drift) > MAX_DRIFT:
        return ClockRefused(
            reason=f"the pairs would need a drift of {drift * 1e6:.0f} ppm, which no clock has",
            disagree=True,
        )
    # Once more without the pairs that do not agree.
    level = float(np.median((offset - drift * since)[agree]))
    residual = offset - level - drift * since
    half_span = float(np.ptp(since)) / 2
    unresolved = SURE_DRIFT * _slope_error(since[agree], residual[agree]) * half_span if drift == 0.0 else 0.0
    return ClockFit(
        offset_ns=base + round(level),
        drift_ppm=drift * 1e6,
        error_ns=int(np.ceil(np.abs(residual[agree]).max() + min(unresolved, MAX_DRIFT * half_span))),
        reference_ns=middle + base + round(level),
        pairs=count,
        agreeing_pairs=int(agree.sum()),
    )


def _slope(since: FloatArray, offset: FloatArray) -> float:
    """Theil-Sen: the median of the slopes between pairs of points; right with up to 29 % wrong points."""
    count = len(since)
    if count > _MAX_SLOPE_PAIRS:
        # Enough of them, evenly spread, tell the same and cost no quadratic time.
        chosen = np.unique(np.linspace(0, count - 1, _MAX_SLOPE_PAIRS).astype(np.int64))
        since, offset = since[chosen], offset[chosen]
        count = len(chosen)
    first, second = np.triu_indices(count, k=1)
    apart = since[second] - since[first]
    some = apart != 0
    if not some.any():
        return 0.0
    return float(np.median((offset[second] - offset[first])[some] / apart[some]))


def _residual(since: FloatArray, offset: FloatArray, drift: float) -> FloatArray:
    level = offset - drift * since
    residual: FloatArray = level - np.median(level)
    return residual


def _slope_error(since: FloatArray, residual: FloatArray) -> float:
    """Standard error of the slope, from the robust spread of the residuals (1.4826 x MAD)."""
    spread = 1.4826 * float(np.median(np.abs(residual))) + 1.0
    reach = float(since.std()) * np.sqrt(len(since))
    return spread / reach if reach else 0.0
