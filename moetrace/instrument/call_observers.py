"""What looks at the result of a timed call: a router's for its expert ids, a dispatch's for its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moetrace.guard import Guard
from moetrace.instrument.wrap import Observer
from moetrace.record.buffer import StepBuffer
from moetrace_schemas.enums import Phase


class RouteObserver:
    """Counts the expert ids in a router's result; compiled graphs count them at the same index."""

    def __init__(self, index: int, guard: Guard) -> None:
        from moetrace.instrument.autograd_state import graph_task
        from moetrace.instrument.routing import find_expert_ids, is_recompute
        from moetrace.instrument.routing_checks import find_weights

        self._index, self._guard = index, guard
        self._find_weights = find_weights
        self._find, self._is_recompute = find_expert_ids, is_recompute
        self._graph_task = graph_task
        self.index_in_graphs = index

    def __call__(self, buffer: StepBuffer, args: tuple[Any, ...], result: Any) -> None:
        """Look at one call."""
        self._guard.run("counts", self._count, buffer, result)

    def _count(self, buffer: StepBuffer, result: Any) -> None:
        ids = self._find(result)
        # A model that is instrumented inside a step is counted from the next one on.
        if ids is None or buffer.counter is None or not buffer.counter.counts(self._index):
            return
        if self._is_recompute(self._graph_task):
            buffer.counter.add_recompute(self._index, ids)
            return
        buffer.counter.add(self._index, ids)
        if buffer.counter.checking:
            weights = self._find_weights(result, ids, buffer.counter.sites[self._index].num_experts)
            if weights is not None:
                buffer.counter.check_weights(self._index, weights)


def dispatch_observer(read: Callable[[Any], Any], layer: int, index: int, guard: Guard) -> Observer:
    """Notes rows and sizes that a dispatch's result shows, as the adapter's `read` finds them.

    Rows received are counted at `index`, where that is 0 or more.
    """
    from moetrace.instrument.autograd_state import graph_task
    from moetrace.instrument.routing import is_recompute

    def count(buffer: StepBuffer, result: Any) -> None:
        if is_recompute(graph_task):
            return
        dispatch = read(result)
        if dispatch is None:
            return
        counter = buffer.counter
        if dispatch.received_ids is not None and counter is not None and index >= 0 and counter.counts(index):
            counter.add(index, dispatch.received_ids)
        buffer.traffic.append((layer, Phase.DISPATCH, dispatch.row_bytes, dispatch.send_sizes))
        buffer.behind_payload[layer, Phase.DISPATCH] = dispatch.exchanges_behind
        buffer.traffic.append((layer, Phase.COMBINE, dispatch.row_bytes, dispatch.receive_sizes))
        buffer.local_rows.append((layer, dispatch.received_rows))

    def observe(buffer: StepBuffer, args: tuple[Any, ...], result: Any) -> None:
        guard.run("traffic", count, buffer, result)

    return observe
