"""NVTX ranges around wrapped calls, for Nsight and other profilers; off unless asked for.

A range is the host's: it shows where a call launches its work, whether or not a step is sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moetrace.guard import Guard
from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.torch_state import TorchState
from moetrace.record.sites import Site

Push = Callable[[str], object]
Pop = Callable[[], object]


def nvtx_functions() -> tuple[Push, Pop] | str:
    """Torch's push and pop, or why there are none here."""
    try:
        import torch

        push: Push = torch.cuda.nvtx.range_push
        pop: Pop = torch.cuda.nvtx.range_pop
        push("moetrace")
        pop()
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"not to be had here: {str(error).splitlines()[0]}"
    return push, pop


def label_of(site: Site) -> str:
    """What a range is called: `moe.dispatch layer 3`, or the callable's own name where it has no phase."""
    what = f"moe.{site.phase}" if site.phase is not None else f"moe.{site.role.value} {site.name}"
    return what if site.layer is None else f"{what} layer {site.layer}"


def _end(pop: Pop, guard: Guard) -> None:
    # Not by the guard's run: a range that has begun ends, also where the stage was switched off meanwhile.
    try:
        pop()
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        guard.caught("ranges", error)


def ranged(
    function: Callable[..., Any], label: str, push: Push, pop: Pop, guard: Guard
) -> Callable[..., Any]:
    """Wrap a callable in a range; where the profiler refuses one, the call goes on without."""
    state = TorchState()
    compiling, active = state.compiling, True

    def learn() -> None:
        nonlocal compiling
        compiling = state.compiling

    state.once_torch_is_there(learn)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling() or not active:
            return function(*args, **kwargs)
        began = guard.run("ranges", push, label)
        try:
            return function(*args, **kwargs)
        finally:
            if began:
                _end(pop, guard)

    def make_passive() -> None:
        nonlocal active
        active = False

    return mark_wrapper(wrapper, function, make_passive)
