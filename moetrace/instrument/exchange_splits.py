"""Rows that hand-written code exchanges, from the splits that its all-to-alls are given.

A dispatch that an adapter knows shows its sizes in its result; a wrapped function does not, but the
`all_to_all_single` inside it is told how many rows go where, as whole numbers on the host: nothing is waited
for. Of several such exchanges in one call (hidden states, ids, weights, scales) the one with the largest rows
is the payload; where that goes in several pieces, they add up. An entry of no rows in a step's traffic says
that there was more than one exchange, so that none of them alone is known by the rows.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

from moetrace.context import RankContext
from moetrace.guard import Guard
from moetrace.instrument.learn_group import NOBODY
from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.torch_state import TorchState
from moetrace.instrument.wrap import Observer
from moetrace.record.buffer import StepBuffer
from moetrace_schemas.enums import Phase


class Recording(Protocol):
    """A tracer, as far as it is needed here."""

    buffer: StepBuffer | None
    context: RankContext
    guard: Guard


class Exchanged(NamedTuple):
    """What one all-to-all was given."""

    row_bytes: int
    sent: list[int]
    """Rows to each rank of its group."""
    received_rows: int


class ExchangeSplits:
    """Watches the all-to-alls inside wrapped exchanges of recorded steps."""

    def __init__(self, tracer: Recording) -> None:
        self._tracer = tracer
        self._inside = NOBODY
        """The thread that is in a dispatch or combine of a recorded step."""
        self._shown: list[Exchanged | None] = []
        """By the all-to-alls of the exchange that runs, or that ended last; None by those that do not say."""
        self._shown_in = NOBODY
        """The thread of that exchange; one that another thread runs beside it is not looked at."""
        self._row_bytes: dict[tuple[int, Phase], tuple[int, int]] = {}
        """Step, and bytes of a row in it: rows of two sizes in one step cannot be added up."""

    def around(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """A dispatch or combine of hand-written code."""
        state = TorchState()
        compiling, active = state.compiling, True

        def learn() -> None:
            nonlocal compiling
            compiling = state.compiling

        state.once_torch_is_there(learn)

        @functools.wraps(exchange)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if compiling() or not active or self._tracer.buffer is None or self._inside != NOBODY:
                return exchange(*args, **kwargs)
            self._inside = self._shown_in = threading.get_ident()
            self._shown = []
            try:
                return exchange(*args, **kwargs)
            finally:
                self._inside = NOBODY

        def make_passive() -> None:
            nonlocal active
            active = False

        return mark_wrapper(watched, exchange, make_passive)

    def beside(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """An all-to-all of torch.distributed."""
        compiling = TorchState().compiling
        parameters = _signature(collective)
        if parameters is None or "input_split_sizes" not in parameters.parameters:
            return collective
        active = True

        def look_at(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._shown.append(exchanged(parameters.bind(*args, **kwargs).arguments))

        @functools.wraps(collective)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not compiling() and active and self._inside == threading.get_ident():
                self._tracer.guard.run("traffic", look_at, args, kwargs)
            return collective(*args, **kwargs)

        def make_passive() -> None:
            nonlocal active
            active = False

        return mark_wrapper(watched, collective, make_passive)

    def observer(self, layer: int, phase: Phase) -> Observer:
        """Notes the rows of a wrapped exchange that has just ended."""

        def note(buffer: StepBuffer) -> None:
            if self._shown_in != threading.get_ident():
                return
            shown, self._shown = self._shown, []
            if any(shown) and not _recomputed():
                self._note(buffer, layer, phase, shown)

        def observe(buffer: StepBuffer, args: tuple[Any, ...], result: Any) -> None:
            self._tracer.guard.run("traffic", note, buffer)

        return observe

    def _note(self, buffer: StepBuffer, layer: int, phase: Phase, shown: list[Exchanged | None]) -> None:
        row_bytes = max(one.row_bytes for one in shown if one is not None)
        payload = [one for one in shown if one is not None and one.row_bytes == row_bytes]
        ranks = self._tracer.context.ep_size
        # Of another group than the expert-parallel one, it has no place in that one's matrix.
        if ranks < 2 or any(len(one.sent) != ranks for one in payload):
            return
        known = self._row_bytes.get((layer, phase))
        if known is not None and known[0] == buffer.step and known[1] != row_bytes:
            buffer.traffic.append((layer, phase, known[1], [0] * ranks))
            return
        self._row_bytes[(layer, phase)] = buffer.step, row_bytes
        sent = [sum(rows) for rows in zip(*(one.sent for one in payload), strict=True)]
        buffer.traffic.append((layer, phase, row_bytes, sent))
        if len(payload) > 1 or shown[-1] is not payload[0]:
            # Rows of a call stand at its last all-to-all: where that is another, or a piece, at none.
            buffer.traffic.append((layer, phase, row_bytes, [0] * ranks))
        if phase is Phase.DISPATCH:
            buffer.local_rows.append((layer, sum(one.received_rows for one in payload)))


def exchanged(given: dict[str, Any]) -> Exchanged | None:
    """Rows of an all-to-all by its arguments; None where they do not say, or what is sent has no rows."""
    tensor = given["input"] if "input" in given else given.get("self")
    sent, received = given.get("input_split_sizes"), given.get("output_split_sizes")
    if tensor is None or tensor.dim() < 2 or not _are_numbers(sent) or not _are_numbers(received):
        return None
    row_bytes = tensor.element_size()
    for size in tensor.shape[1:]:
        row_bytes *= int(size)
    return Exchanged(row_bytes, list(sent), sum(received))


def _are_numbers(splits: Any) -> TypeGuard[Sequence[int]]:
    # Not a tensor: to read one of a device is to wait for it.
    return isinstance(splits, list | tuple) and bool(splits) and all(type(size) is int for size in splits)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _recomputed() -> bool:
    """Whether activation recompute runs: it repeats times, and its rows were counted."""
    from moetrace.instrument.autograd_state import graph_task
    from moetrace.instrument.routing import is_recompute

    return is_recompute(graph_task)
