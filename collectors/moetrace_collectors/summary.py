"""Expert load of every layer of a joined step (pure).

Counts of kind `routed` are what the routers chose, source side, summed over ranks; counts of kind `received`
are what each rank's experts got, destination side. The two units are never mixed: experts are compared by
the first, ranks by the second.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from moetrace_collectors.model import IntArray, JoinedStep, LayerLoad, RankStep
from moetrace_schemas.enums import COUNT_KIND_CODE, CountKind, ForwardMode

ROUTED = COUNT_KIND_CODE[CountKind.ROUTED]
RECEIVED = COUNT_KIND_CODE[CountKind.RECEIVED]


def layer_loads(joined: JoinedStep) -> tuple[LayerLoad, ...]:
    """Load of each layer and forward mode that has routed counts, in ascending (layer, forward mode).

    ::

        max_mean_ratio = max over experts / mean over experts           0.0 without pairs
        cv             = population standard deviation / mean           0.0 without pairs
        rank_max_mean_ratio = max over ranks / mean over ranks of rows received; 0.0 where unknown

    Ranks of all groups are summed: replicas of one expert in several groups are one logical expert.
    """
    loads = []
    for mode in ForwardMode:
        rank_steps = [rank_step for rank_step in joined.rank_steps if rank_step.forward_mode is mode]
        routed = _sum_by_layer(rank_steps, ROUTED)
        received = _received_by_rank(rank_steps)
        loads += [_layer_load(layer, mode, counts, received.get(layer)) for layer, counts in routed.items()]
    return tuple(sorted(loads, key=lambda load: (load.layer, list(ForwardMode).index(load.forward_mode))))


def _layer_load(layer: int, mode: ForwardMode, counts: IntArray, per_rank: IntArray | None) -> LayerLoad:
    tokens = int(counts.sum())
    mean = tokens / len(counts) if len(counts) else 0.0
    return LayerLoad(
        layer=layer,
        forward_mode=mode,
        tokens=tokens,
        max_mean_ratio=float(counts.max() / mean) if mean else 0.0,
        cv=float(counts.std() / mean) if mean else 0.0,
        rank_max_mean_ratio=_max_mean(per_rank) if per_rank is not None else 0.0,
        hot_expert=int(counts.argmax()) if len(counts) else -1,
        dead_experts=int((counts == 0).sum()),
    )


def _max_mean(values: IntArray) -> float:
    total = int(values.sum())
    return float(values.max() * len(values) / total) if total else 0.0


def _sum_by_layer(rank_steps: Iterable[RankStep], kind: int) -> dict[int, IntArray]:
    """Counts per expert summed over ranks and microbatches; a shorter vector counts as zero past its end."""
    sums: dict[int, IntArray] = {}
    for rank_step in rank_steps:
        for row in rank_step.experts:
            if row.kind == kind:
                sums[row.layer] = _add(sums.get(row.layer), row.counts)
    return sums


def _add(total: IntArray | None, counts: IntArray) -> IntArray:
    if total is None:
        return counts.astype(np.int64)
    if len(total) < len(counts):
        total = np.pad(total, (0, len(counts) - len(total)))
    total[: len(counts)] += counts
    return total


def _received_by_rank(rank_steps: list[RankStep]) -> dict[int, IntArray]:
    """Rows received per rank, by layer; a rank that reports the layer counts, with 0 if it got no rows."""
    by_layer: dict[int, dict[int, int]] = {}
    for rank_step in rank_steps:
        for row in rank_step.experts:
            if row.kind == RECEIVED:
                ranks = by_layer.setdefault(row.layer, {})
                ranks[rank_step.rank] = ranks.get(rank_step.rank, 0) + int(row.counts.sum())
    return {
        layer: np.array([ranks[rank] for rank in sorted(ranks)], dtype=np.int64)
        for layer, ranks in by_layer.items()
    }
