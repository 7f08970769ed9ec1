"""How much of the imbalance stays: a transient burst and a stable hot expert need opposite answers. Pure.

A stable hot expert can be moved or replicated, and the gain lasts. A burst is over before a migration is
done; only smaller batches, rate limits or spare replicas everywhere help against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrace_collectors.load.figures import hottest, max_mean_ratio
from moetrace_collectors.model import FloatArray, IntArray

STABLE_SHARE = 0.5
"""From this persistent share on, what is hot now is mostly what will be hot in the next window."""
EVEN_RATIO = 1.1
"""Below this max / mean there is no imbalance to ask about."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stability:
    """Per layer, over consecutive windows; arrays [L]. NaN where it cannot be told."""

    windows: int
    rank_correlation: FloatArray
    """Mean Spearman correlation of the experts' loads in a window and in the next, -1 to 1."""
    hot_set_overlap: FloatArray
    """Mean |A and B| / |A or B| of the k hottest experts in a window (A) and in the next (B), 0 to 1."""
    hot_set_size: int
    """k."""
    hottest_share: FloatArray
    """Part of the windows in which the layer's most frequent hottest expert is the hottest."""
    persistent_share: FloatArray
    """Part of the squared imbalance that is there again in the next window, 0 to 1."""
    kind: tuple[str, ...]
    """[L]: stable, transient, even (nothing to ask about), or unknown."""


def stability(windows: FloatArray, *, hot_set_size: int = 8) -> Stability:
    """Figures of loads [W, L, E] in W consecutive windows.

    ::

        persistent_share = mean_w <x_w, x_(w+1)> / mean_w <x_w, x_w>      x_w = share - 1/E, cut to 0..1

    Sampling noise of two windows is independent, so it cancels in the numerator and not in the
    denominator: a pure burst, and pure noise, give 0.
    """
    count, layers, experts = windows.shape
    size = max(1, min(hot_set_size, experts // 2))
    unknown = np.full(layers, np.nan)
    totals = windows.sum(axis=-1)
    used = totals.min(axis=0) > 0.0
    if count < 2 or experts < 2:
        return Stability(
            windows=count,
            rank_correlation=unknown,
            hot_set_overlap=unknown,
            hot_set_size=size,
            hottest_share=unknown,
            persistent_share=unknown,
            kind=("unknown",) * layers,
        )
    share = np.divide(windows, totals[..., None], out=np.zeros_like(windows), where=totals[..., None] > 0.0)
    away = share - 1.0 / experts
    again = (away[:-1] * away[1:]).sum(axis=-1).mean(axis=0)
    size_now = (away**2).sum(axis=-1).mean(axis=0)
    persistent = np.clip(np.divide(again, size_now, out=np.zeros(layers), where=size_now > 0.0), 0.0, 1.0)
    ratio = max_mean_ratio(windows).mean(axis=0)
    kinds = tuple(
        "unknown"
        if not used[layer]
        else "even"
        if ratio[layer] < EVEN_RATIO
        else "stable"
        if persistent[layer] >= STABLE_SHARE
        else "transient"
        for layer in range(layers)
    )
    return Stability(
        windows=count,
        rank_correlation=np.where(used, _rank_correlation(windows), np.nan),
        hot_set_overlap=np.where(used, _overlap(windows, size), np.nan),
        hot_set_size=size,
        hottest_share=np.where(used, _hottest_share(windows), np.nan),
        persistent_share=np.where(used, persistent, np.nan),
        kind=kinds,
    )


def _rank_correlation(windows: FloatArray) -> FloatArray:
    """[W, L, E] -> [L]: mean over neighbours of Spearman's correlation; 0 where a window is constant."""
    ranks = mean_ranks(windows)
    ranks = ranks - ranks.mean(axis=-1, keepdims=True)
    spread = np.sqrt((ranks**2).sum(axis=-1))
    product = (ranks[:-1] * ranks[1:]).sum(axis=-1)
    scale = spread[:-1] * spread[1:]
    correlation: FloatArray = np.divide(product, scale, out=np.zeros_like(product), where=scale > 0.0)
    mean: FloatArray = correlation.mean(axis=0)
    return mean


def mean_ranks(values: FloatArray) -> FloatArray:
    """[..., n] -> rank of each value from 0; equal values share the mean of their ranks."""
    flat = values.reshape(-1, values.shape[-1])
    ranks = np.empty(flat.shape)
    for row, out in zip(flat, ranks, strict=True):
        _, inverse, counts = np.unique(row, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        out[:] = (ends - (counts + 1) / 2.0)[inverse]
    return ranks.reshape(values.shape)


def _overlap(windows: FloatArray, size: int) -> FloatArray:
    """[W, L, E] -> [L]: mean over neighbours of the Jaccard overlap of their hot sets."""
    hot = np.zeros(windows.shape, dtype=np.bool_)
    np.put_along_axis(hot, hottest(windows, size), True, axis=-1)
    both = (hot[:-1] & hot[1:]).sum(axis=-1)
    overlap: FloatArray = (both / (2 * size - both)).mean(axis=0)
    return overlap


def _hottest_share(windows: FloatArray) -> FloatArray:
    """[W, L, E] -> [L]."""
    first: IntArray = windows.argmax(axis=-1)
    return np.array([np.bincount(layer).max() / len(layer) for layer in first.T])


def split_windows(loads: FloatArray, count: int) -> FloatArray:
    """[S, L, E] -> [W, L, E]: sums over W runs of consecutive steps, as even as can be; W = min(count, S)."""
    count = max(1, min(count, len(loads)))
    edges = window_edges(len(loads), count)
    windows: FloatArray = np.add.reduceat(loads, edges[:-1], axis=0)
    return windows


def window_edges(steps: int, count: int) -> IntArray:
    """[count + 1]: first step of each window and the end; the later windows take what does not divide."""
    return np.arange(count + 1, dtype=np.int64) * steps // count
