"""Marks inside a compiled graph: ops without a result that Dynamo keeps, in order, with no graph break.

A wrapper that torch.compile traces becomes three nodes: `begin`, the plain call, `end`. The ops are
registered as effects, so that no pass drops them or changes their order among each other; and they read
the tensors of the call, so that no pass moves them in front of what makes these. What reads the result
may still be fused with what makes it; it then counts to the phase that makes it.

At run time the ops record into the step that is open then, if any. Ops are addressed by numbers (the
recorder's key, the call site), because a graph outlives the Python objects that it was traced with.

The only part of the library that registers anything with torch; imported where torch is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from moetrace.instrument.recorders import NOBODY, find
from moetrace.instrument.routing import find_expert_ids, padding_flags
from moetrace.instrument.wrap import Recorder
from moetrace.record.buffer import no_mark
from moetrace_schemas.columns import RowFlag

if TYPE_CHECKING:
    from moetrace.adapters.base import Count

_RECOMPUTE = int(RowFlag.RECOMPUTE)
logger = logging.getLogger("moetrace")

_NAMESPACE = "moetrace"
_SCHEMAS = {
    "begin": "(Tensor[] reads, int recorder, int site) -> ()",
    "end": "(Tensor[] reads, int recorder, int site) -> ()",
    "count_ids": "(Tensor ids, int recorder, int index) -> ()",
    "count_mask": "(Tensor mask, int recorder, int index, SymInt pairs) -> ()",
    "count_sizes": "(Tensor sizes, int recorder, int index, SymInt pairs) -> ()",
    "step_begin": "(Tensor[] reads, Tensor[] mask, int recorder) -> ()",
    "step_end": "(Tensor[] reads, int recorder) -> ()",
}


# --- traced: Dynamo reads these, so they keep to what it can follow --------------------------------


def traced_call(
    function: Callable[..., Any], key: int, site: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The plain call between its two marks; without marks in a program that is exported, or once retired."""
    if key == NOBODY or torch.compiler.is_exporting():
        return function(*args, **kwargs)
    torch.ops.moetrace.begin(_tensors(*args, *kwargs.values()), key, site)
    result = function(*args, **kwargs)
    # A collective that fills a buffer returns nothing: its end is when the buffer is full.
    torch.ops.moetrace.end(_tensors(result) or _tensors(*args), key, site)
    return result


def traced_mark(key: int, site: int, *, begins: bool) -> None:
    """One mark that reads nothing: placed by the order of effects alone."""
    if key == NOBODY or torch.compiler.is_exporting():
        return
    if begins:
        torch.ops.moetrace.begin([], key, site)
    else:
        torch.ops.moetrace.end([], key, site)


def traced_count(
    function: Callable[..., Any],
    key: int,
    count: Count,
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The plain call, and then what `count` sees of it."""
    result = function(*args, **kwargs)
    if key != NOBODY and not torch.compiler.is_exporting():
        count(TracedCounter(key), index, args, kwargs, result)
    return result


def traced_route(index: int, key: int, result: Any) -> None:
    """Count the expert ids in a router's result."""
    ids = find_expert_ids(result)
    if AVAILABLE and ids is not None and key != NOBODY and not torch.compiler.is_exporting():
        torch.ops.moetrace.count_ids(ids.detach(), key, index)


def traced_step(
    forward: Callable[..., Any],
    key: int,
    mask: torch.Tensor | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A model's forward: notes padding, and is a step of its own where none is open when it runs."""
    if key == NOBODY or torch.compiler.is_exporting():
        return forward(*args, **kwargs)
    torch.ops.moetrace.step_begin(_tensors(*args, *kwargs.values()), [] if mask is None else [mask], key)
    result = forward(*args, **kwargs)
    torch.ops.moetrace.step_end(_tensors(result), key)
    return result


def _tensors(*items: Any) -> list[torch.Tensor]:
    """Plain tensors among the items, one level deep; subclasses have rules of their own and are left out."""
    found = []
    for item in items:
        if isinstance(item, dict):
            parts = tuple(item.values())
        else:
            parts = tuple(item) if isinstance(item, tuple | list) else (item,)
        for part in parts:
            if type(part) is torch.Tensor:
                found.append(part.detach())
    return found


class TracedCounter:
    """A moetrace.adapters.base.RouteCounter that writes count ops into the graph."""

    traced = True
    checking = False

    def __init__(self, key: int) -> None:
        self._key = key

    def add(self, index: int, expert_ids: Any, padding: Any | None = None) -> None:
        """All pairs of one call."""
        torch.ops.moetrace.count_ids(expert_ids.detach(), self._key, index)

    def add_mask(self, index: int, mask: Any, pairs: int) -> None:
        """All pairs of one call."""
        torch.ops.moetrace.count_mask(mask.detach(), self._key, index, pairs)

    def add_counts(self, index: int, counts: Any, pairs: int) -> None:
        """Counts that are tensors; numbers of the host are not known while a graph is traced."""
        if isinstance(counts, torch.Tensor):
            torch.ops.moetrace.count_sizes(counts.detach(), self._key, index, pairs)

    def add_rows(self, index: int, expert: int, rows: int) -> None:
        """Numbers of the host are not known while a graph is traced: they stay missing."""

    def add_executed(self, index: int, expert_ids: Any) -> None:
        """Not in a graph: what the experts are called with is compared where calls are not compiled."""

    def check_weights(self, index: int, weights: Any) -> None:
        """Not in a graph: weights are checked where calls are not compiled."""


# --- run: what the ops do when the graph runs --------------------------------------------------------


def _begin(reads: list[torch.Tensor], key: int, site: int) -> None:
    recorder: Recorder | None = find(key)
    buffer = recorder.buffer if recorder is not None else None
    if recorder is None or buffer is None:
        return
    try:
        buffer.open_marks.append((site, buffer.mark()))
        if site in buffer.undivided:
            buffer.mark = no_mark
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)


def _end(reads: list[torch.Tensor], key: int, site: int) -> None:
    recorder: Recorder | None = find(key)
    buffer = recorder.buffer if recorder is not None else None
    if recorder is None or buffer is None:
        return
    try:
        opened = buffer.open_marks
        if site in buffer.undivided:
            buffer.mark = buffer.track.mark
        # What a failed call left open lies above the mark that belongs to this end.
        while opened:
            begun, start = opened.pop()
            if begun == site:
                flags = 0 if torch._C._current_graph_task_id() == -1 else _RECOMPUTE
                buffer.add(site, start, buffer.mark(), flags)
                return
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)


def _count(key: int, index: int, add: Callable[[Any], None], pairs: int) -> None:
    recorder: Recorder | None = find(key)
    counter = recorder.buffer.counter if recorder is not None and recorder.buffer is not None else None
    if recorder is None or counter is None or not counter.counts(index):
        return
    if torch._C._current_graph_task_id() == -1:
        recorder.guard.run("counts", add, counter)
    else:
        recorder.guard.run("counts", counter.add_recompute_pairs, index, pairs)


def _count_ids(ids: torch.Tensor, key: int, index: int) -> None:
    _count(key, index, lambda counter: counter.add(index, ids), ids.numel())


def _count_mask(mask: torch.Tensor, key: int, index: int, pairs: int) -> None:
    _count(key, index, lambda counter: counter.add_mask(index, mask, pairs), pairs)


def _count_sizes(sizes: torch.Tensor, key: int, index: int, pairs: int) -> None:
    _count(key, index, lambda counter: counter.add_counts(index, sizes, pairs), pairs)


_GRAPH_STEP = object()
"""Opens and closes steps on behalf of graphs. An exception leaves one open: the next step takes its place."""


def _step_begin(reads: list[torch.Tensor], mask: list[torch.Tensor], key: int) -> None:
    owner: Any = find(key)
    if owner is None or owner.closed:
        return
    if not owner.open_scopes:
        owner.guard.run("step", owner.begin_step, _GRAPH_STEP, None, None, 0, "", None)
    counter = owner.buffer.counter if owner.buffer is not None else None
    if counter is not None:
        counter.padding = padding_flags(mask[0]) if mask else None


def _step_end(reads: list[torch.Tensor], key: int) -> None:
    owner: Any = find(key)
    if owner is None:
        return
    if owner.buffer is not None and owner.buffer.counter is not None:
        owner.buffer.counter.padding = None
    owner.guard.run("step", owner.end_step, _GRAPH_STEP)


_RUN: dict[str, Callable[..., None]] = {
    "begin": _begin,
    "end": _end,
    "count_ids": _count_ids,
    "count_mask": _count_mask,
    "count_sizes": _count_sizes,
    "step_begin": _step_begin,
    "step_end": _step_end,
}


def _register() -> Any | None:
    """Define the ops; None where this torch has no ordered effects, and tracing steps aside as a whole."""
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        library: Any = cast(Any, torch.library.Library)(_NAMESPACE, "FRAGMENT")
        for name, schema in _SCHEMAS.items():
            library.define(name + schema)
            library.impl(name, _RUN[name], "CompositeExplicitAutograd")
            torch.library.register_fake(f"{_NAMESPACE}::{name}", _nothing, lib=library)
            _register_effectful_op(getattr(torch.ops.moetrace, name).default, _EffectType.ORDERED)
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        logger.info("moetrace: this torch takes no marks in compiled graphs (%s)", error)
        return None
    return library


def _nothing(*args: Any) -> None:
    return None


_library = _register()
AVAILABLE = _library is not None
"""Whether compiled graphs can hold marks."""
