"""The expert-parallel group of hand-written code, from the first all-to-all inside its dispatch or combine.

A model that an adapter knows holds its process group; wrapped functions do not, and ranks whose group nobody
told would look like ranks that exchange nothing. Learned once, outside of compiled graphs; what
`moetrace.init(ep_size=...)` says stands.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, Protocol

from moetrace.adapters.groups import expert_parallel
from moetrace.context import RankContext
from moetrace.guard import Guard
from moetrace.instrument.wrap import TorchState

NOBODY = 0
"""No thread has this identifier."""


class Placed(Protocol):
    """A tracer, as far as it is needed here."""

    context: RankContext
    guard: Guard

    def set_expert_parallel(self, ep_rank: int, ep_size: int, ep_group: int) -> None:
        """Take the position in the expert-parallel group."""


class GroupLearner:
    """Watches wrapped exchanges until one has shown its group; then only passes through."""

    def __init__(self, tracer: Placed) -> None:
        self._tracer = tracer
        self._state = TorchState()
        self._inside = NOBODY
        """The thread that is in a dispatch or combine."""
        self.done = False

    def around(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """A dispatch or combine of hand-written code."""
        if self._is_told():
            return exchange

        @functools.wraps(exchange)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._state.compiling() or self.done:
                return exchange(*args, **kwargs)
            self._inside = threading.get_ident()
            try:
                return exchange(*args, **kwargs)
            finally:
                self._inside = NOBODY

        return watched

    def beside(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """An all-to-all of torch.distributed."""
        if self._is_told():
            return collective

        @functools.wraps(collective)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._state.compiling() and not self.done and self._inside == threading.get_ident():
                self._tracer.guard.run("expert_parallel", self._learn, collective, args, kwargs)
            return collective(*args, **kwargs)

        return watched

    def _is_told(self) -> bool:
        context = self._tracer.context
        return self.done or context.ep_size > 1 or context.world_size == 1

    def _learn(self, collective: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.done = True
        from torch import distributed

        group = inspect.signature(collective).bind(*args, **kwargs).arguments.get("group")
        if group is None:
            group = distributed.group.WORLD
        found = expert_parallel(group) if isinstance(group, distributed.ProcessGroup) else None
        if found is not None and self._tracer.context.ep_size == 1:
            self._tracer.set_expert_parallel(found.rank, found.size, found.group)
