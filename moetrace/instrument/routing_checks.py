"""What can be seen of a router's result on the device only: duplicates and weights. No host sync.

Shapes: T tokens, K slots. Results are added to three cells per layer, which travel with the counts.
"""

from __future__ import annotations

from typing import Any

import torch

from moetrace.record.types import ViolationRow
from moetrace_schemas.enums import RoutingViolation

CELLS = (
    RoutingViolation.DUPLICATE_EXPERT,
    RoutingViolation.WEIGHT_NOT_FINITE,
    RoutingViolation.WEIGHT_NOT_NORMALISED,
)
"""What the cells count, in order."""
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.004}
"""Largest distance of a sum of weights from what it should be, as a part of it: weights are rounded before
they are added up. Other types: 0.001."""


def count_duplicates(cells: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor) -> None:
    """Add surplus slots: ids [T, K], valid [T, K] (an expert, of a token that is no padding)."""
    ordered, order = ids.sort(dim=-1)
    valid = valid.gather(-1, order)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & valid[:, 1:] & valid[:, :-1]
    cells[0].add_(twice.sum())


def check_weights(
    cells: torch.Tensor, weights: torch.Tensor, real: torch.Tensor | None, sums: tuple[float, ...]
) -> None:
    """Check weights [T, K] of real tokens [T] (None: all are)."""
    # A number that is none makes its token's sum none.
    total = weights.sum(dim=-1, dtype=torch.float32)
    finite = total.isfinite()
    cells[1].add_((~finite if real is None else ~finite & real).sum())
    if not sums:
        return
    tolerance = TOLERANCE.get(weights.dtype, 0.001)
    wrong = finite if real is None else finite & real
    for expected in sums:
        wrong = wrong & ((total - expected).abs_() > tolerance * abs(expected))
    cells[2].add_(wrong.sum())


def violations(layer: int, cells: list[int]) -> list[ViolationRow]:
    """The cells of one layer as rows, without those that are 0."""
    return [
        ViolationRow(layer=layer, violation=violation, count=count)
        for violation, count in zip(CELLS, cells, strict=True)
        if count
    ]


def find_weights(result: Any, ids: torch.Tensor, num_experts: int) -> torch.Tensor | None:
    """The weights [T, K] that go with ids [T, K] in a router's result: the last float tensor of their shape.

    None where there is none, or where logits [T, E] would have the same shape.
    """
    if ids.dim() < 2 or ids.shape[-1] == num_experts:
        return None
    candidates = result if isinstance(result, (tuple, list)) else (result,)
    found = None
    for item in candidates:
        if isinstance(item, torch.Tensor) and item.dtype.is_floating_point and item.shape == ids.shape:
            found = item
    return found
