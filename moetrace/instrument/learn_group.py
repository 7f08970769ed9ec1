"""The expert-parallel group of hand-written code, from the first all-to-all inside its dispatch or combine.

A model that an adapter knows holds its process group; wrapped functions do not, and ranks whose group nobody
told would look like ranks that exchange nothing. Learned once, outside of compiled graphs, from an
exchange that shows one group; what `moetrace.init(ep_size=...)` says stands.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from moetrace.adapters.groups import expert_parallel
from moetrace.context import RankContext
from moetrace.guard import Guard
from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.torch_state import TorchState

logger = logging.getLogger("moetrace")

NOBODY = 0
"""No thread has this identifier."""
TRIES = 8
"""Exchanges that are looked at; one that shows no group of several ranks may be of something else."""


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
        self._inside = NOBODY
        """The thread that is in a dispatch or combine."""
        self._shown: dict[tuple[int, ...], Any] = {}
        """Groups of several ranks that the running exchange has shown, by their ranks."""
        self._tries = 0
        self.done = False

    def around(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """A dispatch or combine of hand-written code."""
        if self._is_told():
            return exchange
        state = TorchState()
        compiling, active = state.compiling, True

        def learn() -> None:
            nonlocal compiling
            compiling = state.compiling

        state.once_torch_is_there(learn)

        @functools.wraps(exchange)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if compiling() or self.done or not active or self._inside != NOBODY:
                return exchange(*args, **kwargs)
            self._inside = threading.get_ident()
            self._shown.clear()
            try:
                result = exchange(*args, **kwargs)
            finally:
                self._inside = NOBODY
            self._tracer.guard.run("expert_parallel", self._learn)
            return result

        def make_passive() -> None:
            nonlocal active
            active = False

        return mark_wrapper(watched, exchange, make_passive)

    def beside(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """An all-to-all of torch.distributed."""
        if self._is_told():
            return collective
        compiling = TorchState().compiling
        active = True

        @functools.wraps(collective)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not compiling() and not self.done and active and self._inside == threading.get_ident():
                self._tracer.guard.run("expert_parallel", self._look_at, collective, args, kwargs)
            return collective(*args, **kwargs)

        def make_passive() -> None:
            nonlocal active
            active = False

        return mark_wrapper(watched, collective, make_passive)

    def _is_told(self) -> bool:
        context = self._tracer.context
        return self.done or context.ep_size > 1 or context.world_size == 1

    def _look_at(self, collective: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(collective).bind(*args, **kwargs).arguments.get("group")
        group = process_group(given)
        if group is not None and group.size() > 1:
            from torch.distributed import get_process_group_ranks

            self._shown[tuple(get_process_group_ranks(group))] = group

    def _learn(self) -> None:
        """Take what the exchange that has just ended has shown."""
        self._tries += 1
        shown, self._shown = self._shown, {}
        # A fault in what follows would come again.
        self.done = bool(shown) or self._tries >= TRIES
        if len(shown) > 1:
            logger.warning(
                "moetrace: a wrapped dispatch or combine exchanges in groups of %s ranks: which is the "
                "expert-parallel one is not known; pass ep_size=... to moetrace.init()",
                " and ".join(str(len(ranks)) for ranks in shown),
            )
            return
        for group in shown.values():
            found = expert_parallel(group)
            if found is not None and self._tracer.context.ep_size == 1:
                self._tracer.set_expert_parallel(found.rank, found.size, found.group)


def process_group(given: Any) -> Any | None:
    """The process group that a collective was given, by name or mesh too; None where it is unknown."""
    from torch import distributed

    if given is None:
        return distributed.group.WORLD
    if isinstance(given, distributed.ProcessGroup):
        return given
    mesh, *dimension = given if isinstance(given, tuple) else (given,)
    try:
        if isinstance(mesh, str):
            by_name: Any = distributed.distributed_c10d
            return by_name._resolve_process_group(mesh)
        return mesh.get_group(*dimension)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        # No such name, a mesh of several dimensions, a list of ranks.
        return None
