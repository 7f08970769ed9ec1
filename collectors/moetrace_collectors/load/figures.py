"""Figures of uneven load, for any number of layers at once. Pure.

Every function takes loads [..., n] (n experts, or n ranks) and reduces the last axis and no other: averaging
over layers first hides the hot expert, because layers are hot in different places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import FloatArray, IntArray

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadFigures:
    """Figures of one level (experts or ranks); arrays have the shape of the loads without their last axis."""

    total: FloatArray
    max: FloatArray
    mean: FloatArray
    max_mean_ratio: FloatArray
    """max / mean; 0.0 where nothing was counted."""
    cv: FloatArray
    """Population standard deviation / mean; 0.0 where nothing was counted."""
    gini: FloatArray
    """0 (even) to 1 - 1/n (one has everything)."""
    entropy_bits: FloatArray
    """log2(n) where even, 0 where one has everything."""
    dead: IntArray
    """How many have no load."""
    percentiles: FloatArray
    """[..., len(PERCENTILES)]: over experts (or ranks), linear between neighbours."""


def load_figures(loads: FloatArray) -> LoadFigures:
    """All figures of loads [..., n].

    ::

    cv           = sqrt(mean((x - mean)^2)) / mean
    gini         = 2 sum_i i x_(i) / (n sum x) - (n + 1) / n        x_(i) ascending, i from 1
    entropy_bits = - sum p log2 p                                  p = x / sum x
    """
    mean = loads.mean(axis=-1)
    return LoadFigures(
        total=loads.sum(axis=-1),
        max=loads.max(axis=-1),
        mean=mean,
        max_mean_ratio=_over(loads.max(axis=-1), mean),
        cv=_over(loads.std(axis=-1), mean),
        gini=gini(loads),
        entropy_bits=entropy_bits(loads),
        dead=(loads == 0.0).sum(axis=-1),
        percentiles=np.moveaxis(np.percentile(loads, PERCENTILES, axis=-1), 0, -1),
    )


def gini(loads: FloatArray) -> FloatArray:
    """[..., n] -> [...]: Gini coefficient; 0.0 where nothing was counted."""
    n = loads.shape[-1]
    ordered = np.sort(loads, axis=-1)
    weighted = (np.arange(1, n + 1) * ordered).sum(axis=-1)
    total = loads.sum(axis=-1)
    # Rounding leaves -1e-16 where all are equal.
    return np.where(total > 0.0, np.maximum(2.0 * _over(weighted, n * total) - (n + 1) / n, 0.0), 0.0)


def entropy_bits(loads: FloatArray) -> FloatArray:
    """[..., n] -> [...]: entropy of the shares, bits; 0.0 where nothing was counted."""
    share = _over(loads, loads.sum(axis=-1, keepdims=True))
    logs = np.log2(share, out=np.zeros_like(share), where=share > 0.0)
    bits: FloatArray = np.maximum(-(share * logs).sum(axis=-1), 0.0)
    return bits


def max_mean_ratio(loads: FloatArray) -> FloatArray:
    """[..., n] -> [...]: max / mean; 0.0 where nothing was counted."""
    return _over(loads.max(axis=-1), loads.mean(axis=-1))


def hottest(loads: FloatArray, count: int) -> IntArray:
    """[..., n] -> [..., min(count, n)]: indices by falling load, the lower index first among equals."""
    order: IntArray = np.argsort(-loads, axis=-1, kind="stable")[..., :count]
    return order


def _over(value: FloatArray, by: FloatArray) -> FloatArray:
    value, by = np.broadcast_arrays(value, by)
    quotient: FloatArray = np.divide(value, by, out=np.zeros(by.shape), where=by > 0.0)
    return quotient
