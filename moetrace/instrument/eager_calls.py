"""Wrappers around calls that run, and that leave nothing in what torch.compile traces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.torch_state import TorchState


def eager_call(function: Callable[..., Any], watched: Callable[..., Any]) -> Callable[..., Any]:
    """`watched` in the place of `function`; in traced code, and once it was taken back, `function` itself.

    A wrapper may be made before the process has imported torch: it learns of compilation when torch is there.
    """
    state = TorchState()
    # Not asked of `state` in each call: that would be two more of Dynamo's guards for each wrapper.
    compiling, active = state.compiling, True

    def learn() -> None:
        nonlocal compiling
        compiling = state.compiling

    state.once_torch_is_there(learn)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling() or not active:
            return function(*args, **kwargs)
        return watched(*args, **kwargs)

    def make_passive() -> None:
        nonlocal active
        active = False

    return mark_wrapper(wrapper, function, make_passive)
