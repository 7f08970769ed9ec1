"""Confidence intervals by a block bootstrap with weights. Pure; the same seed gives the same interval.

Steps that follow each other resemble each other, so whole blocks are drawn: single steps would make
intervals too narrow. Weights make one side's mix of step sizes that of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import FloatArray, IntArray

REPLICATES = 1_000
CHUNK_CELLS = 1 << 22
"""Replicates x steps that are held at a time (32 MiB of float64)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and its interval."""

    estimate: float
    low: float
    high: float


Statistic = Callable[[FloatArray], FloatArray]
"""[replicates, n] weights of the steps -> [replicates]; the last argument of the figures below is bound."""


def interval_of(
    statistic_before: Statistic,
    statistic_after: Statistic,
    *,
    weights_before: FloatArray,
    weights_after: FloatArray,
    combine: Callable[[FloatArray, FloatArray], FloatArray],
    confidence: float,
    seed: int,
    replicates: int = REPLICATES,
) -> Interval:
    """Of `combine(before, after)`, each side resampled by itself."""
    random = np.random.default_rng(seed)
    before = _replicated(statistic_before, weights_before, random, replicates)
    after = _replicated(statistic_after, weights_after, random, replicates)
    drawn = combine(before, after)
    estimate = combine(
        statistic_before(weights_before[np.newaxis]), statistic_after(weights_after[np.newaxis])
    )
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(drawn, (tail, 1.0 - tail))
    return Interval(estimate=float(estimate[0]), low=float(low), high=float(high))


def weighted_quantile(values: FloatArray, quantile: float) -> Statistic:
    """The smallest value with that share of the weight at or below it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]

    def statistic(weights: FloatArray) -> FloatArray:
        summed = np.cumsum(weights[:, order], axis=1)
        # A rounding error of the sum must not move the quantile by a step.
        wanted = quantile * summed[:, -1:] * (1.0 - 1e-12)
        found: FloatArray = ordered[np.argmax(summed >= wanted, axis=1)]
        return found

    return statistic


def weighted_ratio(part: FloatArray, whole: FloatArray) -> Statistic:
    """Sum of parts over sum of wholes; 0 where there is no whole."""

    def statistic(weights: FloatArray) -> FloatArray:
        total = weights @ whole
        ratio: FloatArray = np.divide(weights @ part, total, out=np.zeros(len(total)), where=total > 0)
        return ratio

    return statistic


def relative(before: FloatArray, after: FloatArray) -> FloatArray:
    """Returns after / before - 1; 0 where before is 0."""
    change: FloatArray = np.divide(after, before, out=np.ones_like(after), where=before > 0) - 1.0
    return change


def difference(before: FloatArray, after: FloatArray) -> FloatArray:
    """Returns after - before."""
    return after - before


def _replicated(
    statistic: Statistic, weights: FloatArray, random: np.random.Generator, replicates: int
) -> FloatArray:
    parts = [
        statistic(drawn * weights) for drawn in _draws(len(weights), random=random, replicates=replicates)
    ]
    return np.concatenate(parts)


def _draws(count: int, *, random: np.random.Generator, replicates: int) -> Iterator[FloatArray]:
    """[some replicates, n]: how often each step was drawn, in circular blocks of n^(1/3) steps."""
    block = max(1, round(count ** (1.0 / 3.0)))
    blocks = -(-count // block)
    at_once = max(1, CHUNK_CELLS // count)
    for start in range(0, replicates, at_once):
        size = min(at_once, replicates - start)
        first = random.integers(0, count, (size, blocks))
        index: IntArray = (first[:, :, None] + np.arange(block)) % count
        index = index.reshape(size, -1)[:, :count] + np.arange(size)[:, None] * count
        yield np.bincount(index.ravel(), minlength=size * count).reshape(size, count).astype(np.float64)
