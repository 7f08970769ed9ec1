"""Figures of uneven load: pure arithmetic over counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import fmean, pstdev

from moetrace_collectors.views.run_records import LayerImbalance, LoadMatrix, LoadView


def max_mean_ratio(counts: Collection[int]) -> float:
    """Largest over mean; 0.0 where nothing was counted."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total > 0 else 0.0


def run_imbalance(
    expert_loads: Collection[LoadMatrix],
    rank_loads: Collection[LoadMatrix],
    step_p95: Mapping[tuple[LoadView, int], float],
) -> tuple[LayerImbalance, ...]:
    """One entry per view and layer of the expert loads, in their order; `step_p95` by view and layer."""
    received = {
        (matrix.view, layer): [rows for rows in counts if rows is not None]
        for matrix in rank_loads
        for layer, counts in zip(matrix.layers, matrix.counts, strict=True)
    }
    return tuple(
        _layer_imbalance(
            view=matrix.view,
            layer=layer,
            pairs={
                expert: count
                for expert, count in zip(matrix.columns, counts, strict=True)
                if count is not None
            },
            rows_per_rank=received.get((matrix.view, layer), []),
            step_p95=step_p95.get((matrix.view, layer)),
        )
        for matrix in expert_loads
        for layer, counts in zip(matrix.layers, matrix.counts, strict=True)
    )


def _layer_imbalance(
    *,
    view: LoadView,
    layer: int,
    pairs: Mapping[int, int],
    rows_per_rank: Collection[int],
    step_p95: float | None,
) -> LayerImbalance:
    total = sum(pairs.values())
    return LayerImbalance(
        view=view,
        layer=layer,
        pairs=total,
        experts=len(pairs),
        max_mean_ratio=max_mean_ratio(pairs.values()),
        step_p95_max_mean_ratio=step_p95,
        cv=pstdev(pairs.values()) / fmean(pairs.values()) if total > 0 else 0.0,
        rank_max_mean_ratio=max_mean_ratio(rows_per_rank) if sum(rows_per_rank) > 0 else None,
        hot_expert=max(pairs, key=pairs.__getitem__),
        dead_experts=sum(count == 0 for count in pairs.values()),
    )
