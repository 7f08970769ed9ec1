"""Marks and counts of a compiled graph when it runs: they record into the step that is open, if any.

Called from generated code in every step, so the way out of a step that is not recorded comes first:
one look at the recorder. Nothing here raises into the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moetrace.instrument.autograd_state import graph_task
from moetrace.instrument.recorders import REFERENCES, find
from moetrace.instrument.routing import padding_flags
from moetrace.instrument.step_kind import note_shape
from moetrace.record.buffer import no_mark
from moetrace_schemas.columns import RowFlag

_RECOMPUTE = int(RowFlag.RECOMPUTE)


def begin(key: int, site: int) -> None:
    """A wrapped call begins."""
    reference = REFERENCES.get(key)
    recorder = reference() if reference is not None else None
    if recorder is None or recorder.buffer is None:
        return
    buffer = recorder.buffer
    try:
        if buffer.backward is not None:
            buffer.backward.graph_runs()
        buffer.open_marks.append((site, buffer.mark()))
        if site in buffer.undivided:
            buffer.mark = no_mark
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)


def end(key: int, site: int) -> None:
    """A wrapped call has returned."""
    reference = REFERENCES.get(key)
    recorder = reference() if reference is not None else None
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
                buffer.add(site, start, buffer.mark(), 0 if graph_task() == -1 else _RECOMPUTE)
                return
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)


def backward_begin(key: int, site: int) -> None:
    """The backward of a wrapped call begins."""
    reference = REFERENCES.get(key)
    recorder = reference() if reference is not None else None
    if recorder is None or recorder.buffer is None or recorder.buffer.backward is None:
        return
    try:
        recorder.buffer.backward.graph_begin(site)
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)


def backward_end(key: int, site: int) -> None:
    """The backward of a wrapped call is over."""
    reference = REFERENCES.get(key)
    recorder = reference() if reference is not None else None
    if recorder is None or recorder.buffer is None or recorder.buffer.backward is None:
        return
    try:
        recorder.buffer.backward.graph_end(site)
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)


def recompute_begin(key: int, site: int) -> None:
    """A wrapped call is computed again, by the graph of the backward."""
    reference = REFERENCES.get(key)
    recorder = reference() if reference is not None else None
    if recorder is None or recorder.buffer is None:
        return
    buffer = recorder.buffer
    try:
        if buffer.backward is None or buffer.backward.is_of_this_step():
            buffer.open_marks.append((site, buffer.mark()))
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
        recorder.record_failed(error)


def recompute_end(key: int, site: int) -> None:
    """What the backward needs of a wrapped call has been computed again."""
    reference = REFERENCES.get(key)
    recorder = reference() if reference is not None else None
    if recorder is None or recorder.buffer is None:
        return
    opened = recorder.buffer.open_marks
    try:
        if opened and opened[-1][0] == site:
            recorder.buffer.add(site, opened.pop()[1], recorder.buffer.mark(), _RECOMPUTE)
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
    if graph_task() == -1:
        recorder.guard.run("counts", add, counter)
    elif counter.sites[index].notes_recompute and (
        recorder.buffer.backward is None or recorder.buffer.backward.is_of_this_step()
    ):
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


def count_rows(key: int, index: int, expert: int, rows: int) -> None:
    """Rows of one expert."""
    if (recorder := _recording(key)) is not None:
        _count(recorder, index, lambda counter: counter.add_rows(index, expert, rows), rows)


_GRAPH_STEP = object()
"""Opens and closes steps on behalf of graphs. An exception leaves one open: the next step takes its place."""


def step_begin(
    mask: list[torch.Tensor], key: int, model: int, trains: bool, cached: bool, length: int
) -> None:
    """A model's forward begins: a step of its own where none is open.

    Args:
        mask: the attention mask of the tokens that run now, or nothing.
        key: the recorder's.
        model: number of the model; another one may call it.
        trains: the call is training.
        cached: see `moetrace.instrument.step_kind.mode_of_call`, as for `length`.
        length: tokens per sequence.
    """
    owner = find(key)
    if owner is not None and not owner.closed:
        owner.guard.run("step", _enter, owner, model)
        if owner.buffer is not None:
            owner.guard.run("forward_mode", note_shape, owner, owner.buffer, trains, cached, length)
            owner.guard.run("padding", _note_padding, owner.buffer, mask)


def step_end(key: int, model: int) -> None:
    """A model's forward has returned."""
    owner = find(key)
    if owner is not None:
        if owner.buffer is not None:
            owner.guard.run("padding", _note_padding, owner.buffer, [])
        owner.guard.run("step", _leave, owner, model)


def _enter(owner: Any, model: int) -> None:
    running = owner.kind.in_graphs
    if owner.open_scopes:
        running.clear()
        return
    # A model that is running already has been left by an exception, and all that it called.
    if model in running:
        del running[running.index(model) :]
    running.append(model)
    if len(running) == 1:
        owner.begin_step(_GRAPH_STEP, None, None, 0, "", None)


def _leave(owner: Any, model: int) -> None:
    running = owner.kind.in_graphs
    if model in running:
        del running[running.index(model) :]
    if not running:
        owner.end_step(_GRAPH_STEP)


def _note_padding(buffer: Any, mask: list[torch.Tensor]) -> None:
    if buffer.counter is not None:
        buffer.counter.padding = None
        if mask:
            buffer.counter.padding = padding_flags(mask[0])
