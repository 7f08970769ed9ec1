"""Marks and counts of a compiled graph when it runs: they record into the step that is open, if any.

Called from generated code in every step, so the way out of a step that is not recorded comes first:
one look at the recorder. Nothing here raises into the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moetrace.instrument.recorders import REFERENCES, find
from moetrace.instrument.routing import padding_flags
from moetrace.record.buffer import no_mark
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import CountKind

_RECOMPUTE = int(RowFlag.RECOMPUTE)
_DESTINATION_SIDE = (CountKind.RECEIVED, CountKind.EXECUTED)
"""Of those, activation recompute is left out; pairs that routers see again are noted apart."""
_graph_task = torch._C._current_graph_task_id


def begin(key: int, site: int) -> None:
    """A wrapped call begins."""
    recorder = REFERENCES[key]() if key in REFERENCES else None
    if recorder is None or recorder.buffer is None:
        return
    buffer = recorder.buffer
    try:
        buffer.open_marks.append((site, buffer.mark()))
        if site in buffer.undivided:
            buffer.mark = no_mark
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)


def end(key: int, site: int) -> None:
    """A wrapped call has returned."""
    recorder = REFERENCES[key]() if key in REFERENCES else None
    if recorder is None or recorder.buffer is None:
        return
    buffer = recorder.buffer
    try:
        opened = buffer.open_marks
        if site in buffer.undivided:
            buffer.mark = buffer.track.mark
        # What a failed call left open lies above the mark that belongs to this end.
        while opened:
            begun, start = opened.pop()
            if begun == site:
                buffer.add(site, start, buffer.mark(), 0 if _graph_task() == -1 else _RECOMPUTE)
                return
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)


def backward_begin(key: int, site: int) -> None:
    """The backward of a wrapped call begins."""
    recorder = REFERENCES[key]() if key in REFERENCES else None
    if recorder is None or recorder.buffer is None or recorder.buffer.backward is None:
        return
    try:
        recorder.buffer.backward.graph_begin(site)
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)


def backward_end(key: int, site: int) -> None:
    """The backward of a wrapped call is over."""
    recorder = REFERENCES[key]() if key in REFERENCES else None
    if recorder is None or recorder.buffer is None or recorder.buffer.backward is None:
        return
    try:
        recorder.buffer.backward.graph_end(site)
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)


def _recording(key: int) -> Any | None:
    """The recorder, while a step of it is recorded."""
    recorder = find(key)
    return recorder if recorder is not None and recorder.buffer is not None else None


def _count(recorder: Any, index: int, add: Callable[[Any], None], pairs: int) -> None:
    counter = recorder.buffer.counter
    if counter is None or not counter.counts(index):
        return
    if _graph_task() == -1:
        recorder.guard.run("counts", add, counter)
    elif counter.sites[index].kind not in _DESTINATION_SIDE:
        recorder.guard.run("counts", counter.add_recompute_pairs, index, pairs)


def count_ids(ids: torch.Tensor, key: int, index: int) -> None:
    """Expert ids of all pairs of one call."""
    if (recorder := _recording(key)) is not None:
        _count(recorder, index, lambda counter: counter.add(index, ids), ids.numel())


def count_mask(mask: torch.Tensor, key: int, index: int, pairs: int) -> None:
    """All pairs of one call as a mask over experts."""
    if (recorder := _recording(key)) is not None:
        _count(recorder, index, lambda counter: counter.add_mask(index, mask, pairs), pairs)


def count_sizes(sizes: torch.Tensor, key: int, index: int, pairs: int) -> None:
    """All pairs of one call as counts per expert."""
    if (recorder := _recording(key)) is not None:
        _count(recorder, index, lambda counter: counter.add_counts(index, sizes, pairs), pairs)


_GRAPH_STEP = object()
"""Opens and closes steps on behalf of graphs. An exception leaves one open: the next step takes its place."""


def step_begin(mask: list[torch.Tensor], key: int) -> None:
    """A model's forward begins: a step of its own where none is open."""
    owner = find(key)
    if owner is None or owner.closed:
        return
    if not owner.open_scopes:
        owner.guard.run("step", owner.begin_step, _GRAPH_STEP, None, None, 0, "", None)
    counter = owner.buffer.counter if owner.buffer is not None else None
    if counter is not None:
        counter.padding = padding_flags(mask[0]) if mask else None


def step_end(key: int) -> None:
    """A model's forward has returned."""
    owner = find(key)
    if owner is None:
        return
    if owner.buffer is not None and owner.buffer.counter is not None:
        owner.buffer.counter.padding = None
    owner.guard.run("step", owner.end_step, _GRAPH_STEP)
