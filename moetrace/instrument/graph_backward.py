"""Marks in the graph of the backward, put there while AOTAutograd traces forward and backward together.

The rules are those of moetrace.instrument.backward, followed once, at the time of the trace: the
backward of a call begins when the gradient of its first output is there, and ends when that of its first
input is; what is still open when an earlier call begins has ended. Hooks on the traced tensors add one
op each to the graph and no node to autograd's, so gradients are added up in the same order and nothing
more is kept for the backward::

    forward     x --[ experts ]--> y --[ combine ]--> z
    traced      gradient of z: begin combine; of y: end combine, begin experts; of x: end experts

An autograd kernel of the ops `begin` and `end` sets the hooks. A fault of ours while a graph is traced
costs marks, never the graph.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from moetrace.instrument import graph_marks
from moetrace.instrument.autograd_state import graph_task
from moetrace.instrument.graph_recompute import label_calls, register_with_partitioner
from moetrace.instrument.recorders import WITH_BACKWARD, find


class _Call:
    """One forward call of a trace."""

    __slots__ = ("began_at", "is_open", "key", "reads", "returned_at", "site", "was_open")

    def __init__(self, key: int, site: int, reads: list[torch.Tensor], began_at: int) -> None:
        self.key = key
        self.site = site
        self.reads = reads
        self.began_at = began_at
        self.returned_at = -1
        self.is_open = self.was_open = False
        """Of its backward."""


class _Trace:
    """One joint trace of forward and backward."""

    def __init__(self) -> None:
        self.marks = 0
        self.task = graph_task()
        """Where it began: in a backward, if that recomputes what has not been compiled yet."""
        self.running: list[_Call] = []
        """Forward calls that have not returned."""
        self.open: list[_Call] = []
        """Calls whose backward has begun and not ended."""
        self.is_labelled = False
        """Whether the forward's nodes know their calls."""


def _is_run(reads: list[torch.Tensor]) -> bool:
    """Whether the op is run and not traced: what lies below autograd is then known."""
    return torch._C._len_torch_dispatch_stack() == 0 and type(reads[0]) is torch.Tensor


def _caught(key: int, error: Exception) -> None:
    """Count a fault of ours at the recorder of a key, where it is still there."""
    recorder = find(key)
    if recorder is not None:
        recorder.guard.caught("compiled_backward", error)


def _label(key: int) -> None:
    """Let nodes of the forward know their calls; without, recompute is part of the backward. Never raises."""
    try:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode: Any = get_proxy_mode()
        if mode is not None:
            label_calls(mode.tracer.graph)
            register_with_partitioner()
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the compiler
        _caught(key, error)


def _at_gradient(tensor: Any, hook: Callable[[torch.Tensor | None], None]) -> None:
    """Call the hook once the gradient of a tensor is complete: None where it gets none.

    So it is with one output of several that come out of one node.
    """
    tensor.register_hook(hook)


class BackwardTracing:
    """The autograd kernels of the ops `begin` and `end`."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self._traces: weakref.WeakKeyDictionary[Any, _Trace] = weakref.WeakKeyDictionary()

    def begin(self, reads: list[torch.Tensor], key: int, site: int) -> None:
        """A forward call begins."""
        if _is_run(reads):
            graph_marks.begin(key, site)
            return
        try:
            self._begun(reads, key, site)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the compiler
            _caught(key, error)
        with torch._C._AutoDispatchBelowAutograd():
            self._ops.begin.default(reads, key, site)

    def end(self, reads: list[torch.Tensor], key: int, site: int) -> None:
        """A forward call has returned `reads`."""
        if _is_run(reads):
            graph_marks.end(key, site)
            return
        try:
            self._returned(reads, key, site)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the compiler
            _caught(key, error)
        with torch._C._AutoDispatchBelowAutograd():
            self._ops.end.default(reads, key, site)

    def _begun(self, reads: list[torch.Tensor], key: int, site: int) -> None:
        trace = self._trace(reads, key)
        if trace is not None:
            trace.marks += 1
            trace.running.append(_Call(key, site, reads, trace.marks))

    def _returned(self, reads: list[torch.Tensor], key: int, site: int) -> None:
        trace = self._trace(reads, key)
        if trace is None:
            return
        trace.marks += 1
        while trace.running:
            call = trace.running.pop()
            if (call.key, call.site) == (key, site):
                call.returned_at = trace.marks
                self._watch(trace, call, reads)
                return

    def _trace(self, reads: list[torch.Tensor], key: int) -> _Trace | None:
        """The trace that is going on; None where nothing is traced that has a backward."""
        if not key & WITH_BACKWARD or not torch.is_grad_enabled():
            return None
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
        # Older ones give the backward no effects of its own.
        if mode is None or not hasattr(mode, "_tokens_forward_output"):
            return None
        trace = self._traces.get(mode)
        if trace is None:
            trace = self._traces[mode] = _Trace()
        # Else a checkpoint, which torch runs again in the backward to see what that needs of it.
        return trace if graph_task() == trace.task else None

    def _watch(self, trace: _Trace, call: _Call, outputs: list[torch.Tensor]) -> None:
        handed_in = {id(tensor) for tensor in call.reads}
        made = [tensor for tensor in outputs if tensor.requires_grad and id(tensor) not in handed_in]
        if made:
            # What is handed through is made, and ended, elsewhere.
            for tensor in made:
                _at_gradient(tensor, functools.partial(self._began, trace, call))
            for tensor in call.reads:
                if tensor.requires_grad:
                    _at_gradient(tensor, functools.partial(self._ended, trace, call))
        call.reads = []

    def _began(self, trace: _Trace, call: _Call, gradient: torch.Tensor | None) -> None:
        if call.was_open or gradient is None:
            return
        try:
            for other in [other for other in trace.open if call.returned_at <= other.began_at]:
                self._close(trace, other, gradient)
            if not trace.is_labelled:
                # The forward is complete when the first backward begins.
                trace.is_labelled = True
                _label(call.key)
            call.is_open = call.was_open = True
            trace.open.append(call)
            self._ops.backward_begin([gradient], call.key, call.site)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the compiler
            _caught(call.key, error)

    def _ended(self, trace: _Trace, call: _Call, gradient: torch.Tensor | None) -> None:
        if not call.is_open or gradient is None:
            return
        try:
            self._close(trace, call, gradient)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the compiler
            _caught(call.key, error)

    def _close(self, trace: _Trace, call: _Call, gradient: torch.Tensor) -> None:
        trace.open.remove(call)
        call.is_open = False
        self._ops.backward_end([gradient], call.key, call.site)
