"""Co-activation of a recorded run, from the pairs that ranks sampled."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moetrace_collectors.load import store_queries as queries
from moetrace_collectors.load.coactivation import CoActivation, check_cells
from moetrace_collectors.model import IntArray
from moetrace_collectors.views.store_rows import Store
from moetrace_schemas.enums import CoactivationSpan


def read_sampled_pairs(
    store: Store,
    values: Mapping[str, int | str | list[int]],
    layers: IntArray,
    experts: int,
    warnings: list[str],
) -> CoActivation | None:
    """Pairs of one forward mode and cohort; None where none were sampled, or not yet of every layer.

    Args:
        store: where the run is.
        values: run, mode and cohort.
        layers: MoE layers of the loads, ascending.
        experts: logical experts.
        warnings: told where layers have not had their turn.

    Raises:
        UsageError: the matrices do not fit in memory.
    """
    rows = store.rows(queries.COACTIVATION, values)
    if not rows:
        return None
    check_cells(len(layers), experts)
    at_layer = {layer: at for at, layer in enumerate(layers.tolist())}
    within = np.zeros((len(layers), experts, experts), dtype=np.int64)
    across = np.zeros((len(layers) - 1, experts, experts), dtype=np.int64)
    seen: dict[str, set[int]] = {span: set() for span in CoactivationSpan}
    for row in rows:
        at, span = at_layer.get(int(row["layer"])), str(row["span"])
        first, second = np.array(row["firsts"], dtype=np.int64), np.array(row["seconds"], dtype=np.int64)
        totals = np.array([int(total) for total in row["totals"]], dtype=np.int64)
        if at is None or span not in seen or max(first.max(), second.max()) >= experts:
            continue
        seen[span].add(at)
        if span == CoactivationSpan.WITHIN:
            np.add.at(within[at], (first, second), totals)
            np.add.at(within[at], (second, first), totals)
        elif at < len(across):
            np.add.at(across[at], (first, second), totals)
    missing = len(layers) - len(seen[CoactivationSpan.WITHIN])
    if missing:
        warnings.append(
            f"co-activation was sampled in {len(layers) - missing} of {len(layers)} layers: left out until "
            "all have had their turn"
        )
        return None
    complete = len(seen[CoactivationSpan.ACROSS]) == len(across)
    return CoActivation(within=within, across=across if complete else None, tokens=0)
