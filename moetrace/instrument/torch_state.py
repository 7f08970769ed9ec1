"""What wrappers ask of torch on the hot path, looked up once.

A process may import moetrace, and wrap its code, before it imports torch. Such wrappers know nothing of
gradients, recompute and compilation until the first step that begins with torch there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from moetrace.instrument.recorders import NOBODY, key_of
from moetrace_schemas.columns import RowFlag

_ERROR = int(RowFlag.ERROR)
_RECOMPUTE = int(RowFlag.RECOMPUTE)


class _Unraised(Exception):
    """Stands in for torch's."""


def _never() -> bool:
    return False


def _no_task() -> int:
    return -1


TracedCall = Callable[[Callable[..., Any], int, int, int], Callable[..., Any]]
"""(function, key of the recorder, call site, index of a count or -1) -> what Dynamo traces in its place."""


def _plain_call(function: Callable[..., Any], key: int, site: int, index: int) -> Callable[..., Any]:
    return function


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters["stats"]["unique_graphs"] if counters else 0


def _exporting(torch: Any) -> Callable[[], bool]:
    """What asks torch whether a call runs for its ops alone."""
    is_exporting = getattr(torch.compiler, "is_exporting", None) or torch.compiler.is_compiling
    is_scripting = getattr(torch.jit, "is_tracing", _never)
    count_modes = getattr(torch._C, "_len_torch_dispatch_stack", _never)

    def exporting() -> bool:
        return is_exporting() or is_scripting() or (count_modes() > 0 and _is_seen_by_proxies())

    return exporting


def _is_seen_by_proxies() -> bool:
    """Whether make_fx follows the running call; where torch does not say, it does not."""
    try:
        return sys.modules["torch.fx.experimental.proxy_tensor"].get_proxy_mode() is not None
    except (KeyError, AttributeError, AssertionError):
        return False


_waiting: list[TorchState] = []
"""States of wrappers that were made before the process imported torch."""


def learn_torch() -> None:
    """Let all wrappers that were made before torch know it; on any thread, and on several at once."""
    while True:
        try:
            # Taken out in one go: another thread would learn, and take out, the same one.
            state = _waiting.pop()
        except IndexError:
            return
        try:
            state.learn()
        except BaseException:
            _waiting.append(state)
            raise


class TorchState:
    """What wrappers ask of torch; harmless constants until the process has imported it."""

    __slots__ = (
        "_told",
        "compiling",
        "exporting",
        "grad_enabled",
        "graph_task",
        "has_torch",
        "stop_recompute",
        "traced",
        "traced_count",
        "traced_mark",
        "traced_step",
    )

    compiling: Callable[[], bool]
    """Whether torch.compile is tracing this frame."""
    exporting: Callable[[], bool]
    """Whether torch.export, torch.jit.trace or make_fx runs this call to see its ops; asked only where
    `compiling` is not true: Dynamo of torch 2.10 and 2.11 takes it for true whatever it traces."""
    graph_task: Callable[[], int]
    """The autograd graph task that runs on this thread, or -1."""
    grad_enabled: Callable[[], bool]
    """Whether calls become part of an autograd graph."""
    stop_recompute: type[BaseException]
    """Raised by activation checkpointing through a recomputed forward once it has seen enough."""
    traced: TracedCall
    """Makes what is traced of a wrapped call: the plain call, with marks where graphs can hold them."""
    traced_count: Callable[..., Any] | None
    """The same of a call that is only counted; None where graphs cannot hold counts."""
    traced_step: Callable[..., Any] | None
    """What is traced of a model's forward."""
    traced_mark: Callable[..., None] | None
    """One mark of a `phase` block."""
    has_torch: bool
    """Whether torch was there to be asked: a process may import it later."""

    def __init__(self) -> None:
        self.compiling, self.graph_task, self.stop_recompute = _never, _no_task, _Unraised
        self.traced, self.grad_enabled, self.exporting = _plain_call, _never, _never
        self.traced_count = self.traced_step = self.traced_mark = None
        self._told: list[Callable[[], None]] = []
        self.has_torch = False
        if "torch" in sys.modules:
            self.learn()
        else:
            _waiting.append(self)

    def once_torch_is_there(self, learn: Callable[[], None]) -> None:
        """Call `learn` when this state changes; not at all where it is complete already."""
        if not self.has_torch:
            self._told.append(learn)

    def learn(self) -> None:
        """Ask torch, and tell those who wait for it."""
        import torch
        from torch.utils import checkpoint

        # The older name says the same of what Dynamo traces.
        compiler: Any = torch.compiler
        self.compiling = getattr(compiler, "is_dynamo_compiling", None) or compiler.is_compiling
        self.exporting = _exporting(torch)
        self.grad_enabled = torch.is_grad_enabled
        self.stop_recompute = getattr(checkpoint, "_StopRecomputationError", _Unraised)
        from moetrace.instrument import autograd_state, compiled

        self.graph_task = autograd_state.graph_task

        if compiled.AVAILABLE:
            self.traced, self.traced_count = compiled.traced_call, compiled.traced_count
            self.traced_step, self.traced_mark = compiled.traced_step, compiled.traced_mark
        self.has_torch = True
        for learn in self._told:
            learn()
        self._told.clear()

    def in_graph(
        self, function: Callable[..., Any], recorder: object, site: int, index: int = -1
    ) -> Callable[..., Any]:
        """What is traced of a wrapped call of a recorder."""
        key = key_of(recorder)
        return function if key == NOBODY else self.traced(function, key, site, index)

    def flags(self) -> int:
        """RECOMPUTE where a forward runs inside backward: that is activation recompute."""
        return 0 if self.graph_task() == -1 else _RECOMPUTE

    def error_flags(self, error: BaseException) -> int:
        """Flags of a call that `error` leaves."""
        flags = self.flags()
        return flags if isinstance(error, self.stop_recompute) else flags | _ERROR
