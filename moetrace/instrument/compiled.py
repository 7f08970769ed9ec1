"""Marks inside a compiled graph: ops without a result that Dynamo keeps, in order, with no graph break.

A wrapper that torch.compile traces becomes three nodes: `begin`, the plain call, `end`. The ops are
registered as effects, so that no pass drops them or changes their order among each other; and they read
the tensors of the call, so that no pass moves them in front of what makes these. What reads the result
may still be fused with what makes it; it then counts to the phase that makes it. The graph of the
backward gets marks of its own where it is traced (moetrace.instrument.graph_backward).

What the ops do is in moetrace.instrument.graph_marks. They are addressed by numbers (the recorder's
key, the call site), because a graph outlives the Python objects that it was traced with.

The only part of the library that registers anything with torch; imported where torch is.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.torch_version import TorchVersion

from moetrace.instrument import graph_marks
from moetrace.instrument.graph_backward import BackwardTracing
from moetrace.instrument.graph_calls import register_with_inductor
from moetrace.instrument.graph_numbers import INDEX, KEY, SITE, with_numbers
from moetrace.instrument.recorders import NOBODY
from moetrace.instrument.routing import find_expert_ids
from moetrace.instrument.step_kind import has_cache, tokens_per_sequence

if TYPE_CHECKING:
    from moetrace.adapters.base import Count

logger = logging.getLogger("moetrace")

_NAMESPACE = "moetrace"
_OLDEST = (2, 10)
"""Dynamo of older ones cannot follow the code that marks bring: a graph would break, or not be compiled."""
_NEEDED = (
    "compiler.is_exporting",
    "compiler.is_dynamo_compiling",
    "library.register_fake",
    "_C._AutoDispatchBelowAutograd",
    "_C._get_dispatch_mode",
    "_C._len_torch_dispatch_stack",
    "_C._TorchDispatchModeKey.FUNCTIONAL",
)
"""Names of torch that marks ask for while a graph is traced or run: private ones, and newer than 2.4."""
_NEEDED_BY_BACKWARD = ("_C._autograd._get_sequence_nr", "_C._current_autograd_node")
"""What tells a backward of this step from one of an earlier step."""
_SCHEMAS = {
    "begin": "(Tensor[] reads, int recorder, int site) -> ()",
    "end": "(Tensor[] reads, int recorder, int site) -> ()",
    "backward_begin": "(Tensor[] reads, int recorder, int site) -> ()",
    "backward_end": "(Tensor[] reads, int recorder, int site) -> ()",
    "recompute_begin": "(Tensor[] reads, int recorder, int site) -> ()",
    "recompute_end": "(Tensor[] reads, int recorder, int site) -> ()",
    "count_ids": "(Tensor ids, int recorder, int index) -> ()",
    "count_mask": "(Tensor mask, int recorder, int index, SymInt pairs) -> ()",
    "count_sizes": "(Tensor sizes, int recorder, int index, SymInt pairs) -> ()",
    "count_rows": "(Tensor[] reads, int recorder, int index, int expert, SymInt rows) -> ()",
    "step_begin": "(Tensor[] reads, Tensor[] mask, int recorder, int model, bool trains, bool cached, "
    "SymInt length) -> ()",
    "step_end": "(Tensor[] reads, int recorder, int model) -> ()",
}


# --- traced: Dynamo reads these, so they keep to what it can follow --------------------------------


def _flag_of_export() -> bool:
    return torch.compiler._is_exporting_flag


def _is_older_than(release: tuple[int, int]) -> bool:
    """Whether this torch is; one whose version is no number, as builds may have it, counts as a new one."""
    try:
        version: Any = TorchVersion(str(torch.__version__))
        return bool(version < release)
    except Exception:  # noqa: BLE001 - a name may raise anything, and nothing may reach the model
        return False


# Dynamo of older ones takes the function for true whatever it traces, and all marks would be left out.
_is_exporting: Any = (
    _flag_of_export if _is_older_than((2, 12)) else getattr(torch.compiler, "is_exporting", _flag_of_export)
)


def traced_call(function: Callable[..., Any], key: int, site: int, index: int) -> Callable[..., Any]:
    """The plain call between its two marks; without marks in a program that is exported.

    With an index of 0 or more, expert ids in the result are counted there.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_exporting():
            return function(*args, **kwargs)
        torch.ops.moetrace.begin(_plain_tensors(*args, *kwargs.values()), "moetrace key", "moetrace site")
        result = function(*args, **kwargs)
        # A collective that fills a buffer returns nothing: its end is when the buffer is full.
        reads = _plain_tensors(result) or _plain_tensors(*args)
        torch.ops.moetrace.end(reads, "moetrace key", "moetrace site")
        return result

    def route(*args: Any, **kwargs: Any) -> Any:
        if _is_exporting():
            return function(*args, **kwargs)
        torch.ops.moetrace.begin(_plain_tensors(*args, *kwargs.values()), "moetrace key", "moetrace site")
        result = function(*args, **kwargs)
        torch.ops.moetrace.end(_plain_tensors(result), "moetrace key", "moetrace site")
        ids = find_expert_ids(result)
        if ids is not None:
            torch.ops.moetrace.count_ids(ids.detach(), "moetrace key", "moetrace index")
        return result

    return with_numbers(call if index < 0 else route, {KEY: key, SITE: site, INDEX: index})


def traced_mark(key: int, site: int, *, begins: bool) -> None:
    """One mark that reads nothing: placed by the order of effects alone."""
    if key == NOBODY or _is_exporting():
        return
    if begins:
        torch.ops.moetrace.begin([], key, site)
    else:
        torch.ops.moetrace.end([], key, site)


def traced_count(function: Callable[..., Any], key: int, count: Count, index: int) -> Callable[..., Any]:
    """The plain call, and then what `count` sees of it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not _is_exporting():
            count(TracedCounter("moetrace key"), "moetrace index", args, kwargs, result)  # type: ignore[arg-type]
        return result

    return with_numbers(call, {KEY: key, INDEX: index})


def traced_step(
    forward: Callable[..., Any],
    key: int,
    model: int,
    mask: torch.Tensor | None,
    trains: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A model's forward: notes padding and what it is for; a step of its own where none is open then."""
    if key == NOBODY or _is_exporting():
        return forward(*args, **kwargs)
    reads = [tensor.detach() for tensor in _plain_tensors(*args, *kwargs.values())]
    cached, length = has_cache(kwargs), tokens_per_sequence(args, kwargs)
    masks = [] if mask is None else [mask]
    torch.ops.moetrace.step_begin(reads, masks, key, model, trains, cached, length)
    result = forward(*args, **kwargs)
    torch.ops.moetrace.step_end([tensor.detach() for tensor in _plain_tensors(result)], key, model)
    return result


def _plain_tensors(*items: Any) -> list[torch.Tensor]:
    """Plain tensors among the items, one level deep; subclasses have rules of their own and are left out."""
    found = []
    for item in items:
        if isinstance(item, dict):
            parts = tuple(item.values())
        else:
            parts = tuple(item) if isinstance(item, tuple | list) else (item,)
        for part in parts:
            if type(part) is torch.Tensor:
                found.append(part)
    return found


class TracedCounter:
    """A moetrace.adapters.base.RouteCounter that writes count ops into the graph."""

    traced = True
    checking = False

    def __init__(self, key: int) -> None:
        self._key = key

    def counted(self, index: int) -> bool:
        """Not known while a graph is traced."""
        return False

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
        """A shape: known in every run of the graph, whatever it was when that was traced."""
        torch.ops.moetrace.count_rows([], self._key, index, expert, rows)

    def add_executed(self, index: int, expert_ids: Any) -> None:
        """Not in a graph: what the experts are called with is compared where calls are not compiled."""

    def check_weights(self, index: int, weights: Any) -> None:
        """Not in a graph: weights are checked where calls are not compiled."""


# --- registered with torch -----------------------------------------------------------------------------

LIMITS: list[tuple[str, str]] = []
"""What this torch lets nobody record of compiled graphs, and why; reports of coverage tell it."""

_RUN: dict[str, Callable[..., None]] = {
    "begin": lambda reads, key, site: graph_marks.begin(key, site),
    "end": lambda reads, key, site: graph_marks.end(key, site),
    "backward_begin": lambda reads, key, site: graph_marks.backward_begin(key, site),
    "backward_end": lambda reads, key, site: graph_marks.backward_end(key, site),
    "recompute_begin": lambda reads, key, site: graph_marks.recompute_begin(key, site),
    "recompute_end": lambda reads, key, site: graph_marks.recompute_end(key, site),
    "count_ids": graph_marks.count_ids,
    "count_mask": graph_marks.count_mask,
    "count_sizes": graph_marks.count_sizes,
    "count_rows": lambda reads, *call: graph_marks.count_rows(*call),
    "step_begin": lambda reads, *call: graph_marks.step_begin(*call),
    "step_end": lambda reads, key, model: graph_marks.step_end(key, model),
}
"""What an op does where a graph calls it as an op. Reads are there for the order of the graph alone."""


def _register() -> Any | None:
    """Define the ops; None where this torch has no ordered effects, and tracing steps aside as a whole."""
    try:
        if _is_older_than(_OLDEST):
            raise NotImplementedError(f"{'.'.join(map(str, _OLDEST))} or newer does")
        operator.attrgetter(*_NEEDED)(torch)
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        library: Any = cast(Any, torch.library.Library)(_NAMESPACE, "FRAGMENT")
        for name, schema in _SCHEMAS.items():
            library.define(name + schema)
            library.impl(name, _RUN[name], "CompositeExplicitAutograd")
            torch.library.register_fake(f"{_NAMESPACE}::{name}", _nothing, lib=library)
            _register_effectful_op(getattr(torch.ops.moetrace, name).default, _EffectType.ORDERED)
        _trace_backward(library)
    except Exception as error:  # noqa: BLE001 - names that are not public may do anything by now
        _limited("compiled graphs", "keeps no marks in compiled graphs", error)
        return None
    return library


def _trace_backward(library: Any) -> None:
    """Let marks of the forward bring those of the backward; where this torch cannot, the former are alone."""
    try:
        operator.attrgetter(*_NEEDED_BY_BACKWARD)(torch)
    except AttributeError as error:
        _limited("backward of compiled graphs", "does not say whose backward runs: it is not recorded", error)
        return
    backward = BackwardTracing(torch.ops.moetrace)
    library.impl("begin", backward.begin, "Autograd")
    library.impl("end", backward.end, "Autograd")


def _limited(what: str, lack: str, error: Exception) -> None:
    lines = str(error).splitlines() or [type(error).__name__]
    LIMITS.append((what, f"torch {torch.__version__} {lack} ({lines[0]})"))
    logger.info("moetrace: %s: %s", *LIMITS[-1])


def _nothing(*args: Any) -> None:
    # Asked for while a graph is traced, and so before inductor writes code for it.
    register_with_inductor()


_library = _register()
AVAILABLE = _library is not None
"""Whether compiled graphs can hold marks."""
