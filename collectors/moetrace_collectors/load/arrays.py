"""Checks an array of loads before anything is computed from it. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moetrace_collectors.errors import UsageError
from moetrace_collectors.model import FloatArray

MAX_LOAD = 2.0**53
"""Above it a float64 no longer counts single rows."""


def as_loads(values: npt.ArrayLike, *, name: str = "loads") -> FloatArray:
    """Loads as float64 [steps, layers, experts].

    Args:
        values: [layers, experts] (one step) or [steps, layers, experts], rows or (token, slot) pairs.
        name: what the message calls them.

    Raises:
        UsageError: not such an array, or a value that is no load; names the first one and the fix.
    """
    try:
        loads = np.asarray(values, dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{name}: numbers as [layers, experts] or [steps, layers, experts] expected"
        ) from error
    if loads.ndim == 2:
        loads = loads[np.newaxis]
    if loads.ndim != 3 or 0 in loads.shape:
        raise UsageError(
            f"{name} of shape {list(loads.shape)}: [layers, experts] or [steps, layers, experts] expected, "
            "with at least one of each"
        )
    # NaN fails every comparison, so it is caught here as well.
    wrong = ~((loads >= 0.0) & (loads <= MAX_LOAD))
    if wrong.any():
        step, layer, expert = (int(index) for index in np.argwhere(wrong)[0])
        raise UsageError(
            f"{name}[step {step}, layer {layer}, expert {expert}] = {loads[step, layer, expert]:g}: "
            "a finite load of 0 or more expected; leave the step out, or write 0 where nothing was counted"
        )
    return loads
