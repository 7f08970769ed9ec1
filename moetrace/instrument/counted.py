"""Wraps callables that are counted and not timed: what a router chose, or what experts were called with.

Several layouts show the expert ids in an argument, or as counts or masks, so that a count function of
the adapter (moetrace.adapters.base.Count) looks at the whole call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from moetrace.adapters.base import is_traceable
from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.recorders import NOBODY, key_of
from moetrace.instrument.torch_state import TorchState
from moetrace.instrument.wrap import RETIRED, Recorder

if TYPE_CHECKING:
    from moetrace.adapters.base import Count, RouteCounter


class RecomputeCounter:
    """Notes pairs that activation recompute sees again, apart from those of the forward."""

    checking = False

    def __init__(self, counter: Any) -> None:
        self._counter = counter

    def counted(self, index: int) -> bool:
        """Whether the forward was counted."""
        return bool(self._counter.counted(index))

    def add(self, index: int, expert_ids: Any, padding: Any | None = None) -> None:
        """All pairs of one call."""
        self._counter.add_recompute(index, expert_ids)

    def add_executed(self, index: int, expert_ids: Any) -> None:
        """Those are the pairs of the router again."""

    def check_weights(self, index: int, weights: Any) -> None:
        """They were checked in the forward."""

    def add_mask(self, index: int, mask: Any, pairs: int) -> None:
        """All pairs of one call."""
        self._counter.add_recompute_pairs(index, pairs)

    def add_counts(self, index: int, counts: Any, pairs: int) -> None:
        """All pairs of one call."""
        self._counter.add_recompute_pairs(index, pairs)

    def add_rows(self, index: int, expert: int, rows: int) -> None:
        """Pairs of one expert."""
        self._counter.add_recompute_pairs(index, rows)


def counted(function: Callable[..., Any], recorder: Recorder, count: Count, index: int) -> Callable[..., Any]:
    """Wrap a callable so that `count` sees each call of a sampled step.

    Args:
        function: what is wrapped.
        recorder: the tracer.
        count: looks at arguments and result.
        index: row of the counter.
    """
    state = TorchState()
    compiling, key = state.compiling, key_of(recorder)
    in_graph = function
    # What Dynamo cannot follow would break the graph: only functions that say so are traced.
    if key != NOBODY and state.traced_count is not None and is_traceable(count):
        in_graph = state.traced_count(function, key, count, index)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return in_graph(*args, **kwargs)
        buffer = recorder.buffer
        # A model that is instrumented inside a step is counted from the next one on.
        if buffer is None or buffer.counter is None or not buffer.counter.counts(index):
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        counter: RouteCounter | None = buffer.counter
        if state.graph_task() != -1:
            notes = buffer.counter.sites[index].notes_recompute
            counter = RecomputeCounter(buffer.counter) if notes else None
        if counter is not None:
            began = perf_counter_ns()
            recorder.guard.run("counts", count, counter, index, args, kwargs, result)
            buffer.counting_ns += perf_counter_ns() - began
        return result

    def retire() -> None:
        nonlocal recorder, in_graph
        recorder, in_graph = RETIRED, function

    return mark_wrapper(wrapper, function, retire)
