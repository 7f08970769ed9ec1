"""What DeepEP's low-latency kernels say of their waits: for how long this rank waited for each other rank.

The kernels add to an int64 tensor [N] where the caller passes one. Where the caller left it out, a tensor
of ours goes in, one per communication buffer and phase, at the same address for good, so that captured
graphs may hold it. A step zeroes these tensors when it begins and copies them to the host when it ends;
nothing waits.

Shapes: N ranks of the expert-parallel group; [N] and int64 is what the kernels' host code asks for, while
the package's own docstring (1.2.1) says [N, N]. Units: cycles of the SM clock, summed over warps: large or
small against each other only, never a time.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.torch_state import TorchState
from moetrace.instrument.wrap import RETIRED, Recorder
from moetrace.record.types import WaitRow
from moetrace_schemas.enums import Phase

PARAMETERS = {
    "dispatch_wait_recv_cost_stats": Phase.DISPATCH,
    "combine_wait_recv_cost_stats": Phase.COMBINE,
}
"""The parameter of each call that takes the tensor."""
_ORDER = tuple(PARAMETERS.values())

_tensors: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()
"""[2, N] by communication buffer: dispatch, combine."""


class WaitReader:
    """Reads the tensors for one counter; `begin` to `finish` on the model's thread, the rest behind it."""

    def __init__(self) -> None:
        self.used: dict[int, torch.Tensor] = {}
        """Tensors that calls of this step were given, by identity."""
        self._host: dict[int, torch.Tensor] = {}
        self._read: list[torch.Tensor] = []
        self._copied: Any = None

    def begin(self) -> None:
        """Zero all tensors: a graph that is replayed outside of recorded steps adds to them too."""
        self.used.clear()
        self._read = []
        for tensor in list(_tensors.values()):
            tensor.zero_()

    def finish(self) -> None:
        """Start the copies to the host."""
        for key, tensor in self.used.items():
            if tensor.device.type != "cuda":
                self._read.append(tensor.clone())
                continue
            host = self._host.get(key)
            if host is None or host.shape != tensor.shape:
                host = self._host[key] = torch.zeros(tensor.shape, dtype=torch.int64, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            self._read.append(host)
            self._copied = self._copied or cast(Any, torch.cuda.Event)()
        if self._read and self._copied is not None:
            self._copied.record()

    def ready(self) -> bool:
        """Whether `rows` may be read. Never waits."""
        return not self._read or self._copied is None or bool(self._copied.query())

    def rows(self) -> tuple[WaitRow, ...]:
        """Waits of this step by phase, once `ready`; phases in which nothing was added are missing."""
        sums: dict[tuple[Phase, int], list[int]] = {}
        for host in self._read:
            for phase, waits in zip(_ORDER, host.tolist(), strict=True):
                if any(waits):
                    have = sums.setdefault((phase, len(waits)), [0] * len(waits))
                    sums[phase, len(waits)] = [a + b for a, b in zip(have, waits, strict=True)]
        return tuple(WaitRow(phase=phase, waits=tuple(waits)) for (phase, _), waits in sums.items())


def with_wait_stats(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Wrap a method of a communication buffer that may take a tensor for waits; the method itself if not.

    A caller that passes one keeps it, and its waits stay the caller's.
    """
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        # Compiled code that does not say what it takes.
        return function
    name = next((known for known in PARAMETERS if known in names), None)
    if name is None:
        return function
    at, row = names.index(name), _ORDER.index(PARAMETERS[name])
    state = TorchState()

    def give(found: list[torch.Tensor], args: tuple[Any, ...], rows: Any) -> None:
        tensor = tensor_of(args[0], rows) if args else None
        if tensor is None or recorder.buffer is None or recorder.buffer.counter is None:
            return
        recorder.buffer.counter.waits.used[id(tensor)] = tensor
        found.append(tensor[row])

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if state.compiling() or recorder is RETIRED:
            return function(*args, **kwargs)
        given = args[at] if at < len(args) else kwargs.get(name)
        if given is not None:
            return function(*args, **kwargs)
        found: list[torch.Tensor] = []
        recorder.guard.run("wait_stats", give, found, args, args[1] if len(args) > 1 else kwargs.get("x"))
        if not found:
            return function(*args, **kwargs)
        if at < len(args):
            args = (*args[:at], found[0], *args[at + 1 :])
        else:
            kwargs = {**kwargs, name: found[0]}
        return function(*args, **kwargs)

    def retire() -> None:
        nonlocal recorder
        recorder = RETIRED

    return mark_wrapper(wrapper, function, retire)


def tensor_of(owner: Any, rows: Any) -> torch.Tensor | None:
    """The tensor [2, N] of the communication buffer `owner` that is called with these rows.

    Made at the buffer's first call, in a recorded step or not, so that graphs which are captured later
    find it. None where the buffer does not say its ranks, or a graph is being captured now: what is
    allocated then belongs to the graph.
    """
    if not isinstance(rows, torch.Tensor):
        return None
    device = rows.device
    tensor = _tensors.get(owner)
    if tensor is None:
        ranks = getattr(owner, "group_size", None)
        if not isinstance(ranks, int) or ranks < 1:
            return None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        with torch.inference_mode(False):
            tensor = _tensors[owner] = torch.zeros((len(_ORDER), ranks), dtype=torch.int64, device=device)
    return tensor
