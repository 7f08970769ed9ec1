"""The definitions of balance that the field uses, by name: they disagree, so a figure says which. Pure.

All take rank loads [..., L, R] and reduce R first, layer by layer. One common fault sums over layers before
it takes the maximum over ranks: layers are hot on different ranks, so the sum looks even and the fault reads
as balance (or, on the wrong axis of a square array, as imbalance that is not there).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One definition of balance over all layers of [L, R]."""

    name: str
    formula: str
    used_by: str
    perfect: float
    """Its value where every rank has the same load."""
    value: Callable[[FloatArray], float]
    """[L, R] -> its value; layers without load are left out. NaN where no layer has any."""


def balancedness_layer(rank_loads: FloatArray) -> FloatArray:
    """[..., R] -> [...]: mean / max, 1 is even, 1/R is all on one; NaN where nothing was counted."""
    largest = rank_loads.max(axis=-1)
    balance: FloatArray = np.divide(
        rank_loads.mean(axis=-1), largest, out=np.full(largest.shape, np.nan), where=largest > 0.0
    )
    return np.minimum(balance, 1.0)  # thirds of a load round to a little more


def balancedness_mean(rank_loads: FloatArray) -> float:
    """[..., R] -> mean over everything else of mean / max; places without load are left out."""
    values = balancedness_layer(rank_loads)
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def balancedness_sum(rank_loads: FloatArray) -> float:
    """[..., R] -> (sum of mean over ranks) / (sum of max over ranks), sums over everything else.

    The part of the experts' time that is work and not waiting for the fullest rank, if time follows rows.
    """
    largest = float(rank_loads.max(axis=-1).sum())
    return min(float(rank_loads.mean(axis=-1).sum()) / largest, 1.0) if largest > 0.0 else float("nan")


def _max_mean(rank_loads: FloatArray) -> float:
    balance = balancedness_layer(rank_loads)
    known = balance[~np.isnan(balance)]
    return float((1.0 / known).mean()) if len(known) else float("nan")


DEFINITIONS: Mapping[str, Definition] = {
    definition.name: definition
    for definition in (
        Definition(
            name="max_mean_ratio",
            formula="mean over layers of (max over ranks / mean over ranks)",
            used_by="operators' dashboards, and moetrace's hot-spot threshold",
            perfect=1.0,
            value=_max_mean,
        ),
        Definition(
            name="balancedness_mean",
            formula="mean over layers of (mean over ranks / max over ranks)",
            used_by="SGLang (which adds 1e-5 to both)",
            perfect=1.0,
            value=balancedness_mean,
        ),
        Definition(
            name="balancedness_sum",
            formula="(sum over layers of mean over ranks) / (sum over layers of max over ranks)",
            used_by="vLLM",
            perfect=1.0,
            value=balancedness_sum,
        ),
        Definition(
            name="imbalance_ratio",
            formula="mean over layers of ((max over ranks - mean over ranks) / mean over ranks)",
            used_by="TensorRT-LLM, and as MaxVio in training",
            perfect=0.0,
            value=lambda rank_loads: _max_mean(rank_loads) - 1.0,
        ),
    )
}
"""Definition by name."""
