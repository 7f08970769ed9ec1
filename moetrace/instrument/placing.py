"""Which wrapper a callable gets, and its call site: by how an adapter says that it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moetrace.adapters.base import Call, Target
from moetrace.instrument.counted import counted
from moetrace.instrument.exchange_splits import ExchangeSplits
from moetrace.instrument.learn_group import GroupLearner
from moetrace.instrument.patches import Patches, mark_of
from moetrace.instrument.receive_hook import timed_event_wait, timed_receive
from moetrace.instrument.wait_handles import handle_of, tensor_handles, work_handles
from moetrace.instrument.wrap import Observer, timed, timed_launch, timed_wait
from moetrace.record.sites import Role, Site

if TYPE_CHECKING:
    from moetrace.adapters.base import Count
    from moetrace.tracer import Tracer


class Placing:
    """Puts wrappers of one tracer in place."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.learner = GroupLearner(tracer)
        self.splits = ExchangeSplits(tracer)
        self.nvtx: Any = None
        """Push and pop of profilers' ranges, or why there are none; None before anybody asked."""

    def place(self, patches: Patches, target: Target, observe: Observer | None = None) -> None:
        """Time a target, unless it is timed already."""
        if mark_of(getattr(target.owner, target.attribute)):
            # The same function under another module's name.
            return
        tracer = self._tracer
        site = tracer.sites.add(Site(target.role, target.phase, target.layer, target.name, target.per_step))

        def make(current: Callable[..., Any]) -> Callable[..., Any]:
            if target.call is Call.RECEIVE and tracer.config.wait_stats:
                from moetrace.instrument.wait_stats import with_wait_stats

                current = with_wait_stats(current, tracer)
            if target.call is Call.LAUNCH:
                current = self.splits.beside(self.learner.beside(current))
            current = self.with_range(current, site)
            if target.call is Call.LAUNCH:
                return timed_launch(current, tracer, site, handle_of)
            if target.call is Call.RECEIVE:
                waited = Site(Role.WAIT, name=f"{target.name}.hook", per_step=False)
                return timed_receive(current, tracer, site, tracer.sites.add(waited), tracer.sites.sites)
            if target.call is Call.WAIT_EVENT:
                return timed_event_wait(current, tracer, site)
            if target.call is Call.WAIT:
                return timed_wait(current, tracer, site, tensor_handles, guess=True)
            if target.call is Call.WAIT_WORK:
                return timed_wait(current, tracer, site, work_handles, guess=False)
            return timed(current, tracer, site, observe=observe)

        patches.replace(target.owner, target.attribute, make)
        patches.sites[site] = (target.owner, target.attribute)

    def place_count(self, patches: Patches, target: Target, count: Count, index: int) -> None:
        """Let the target's count function see its calls; `index` is the counter's row."""

        def make(current: Callable[..., Any]) -> Callable[..., Any]:
            return counted(current, self._tracer, count, index)

        patches.replace(target.owner, target.attribute, make)

    def with_range(self, function: Callable[..., Any], number: int) -> Callable[..., Any]:
        """The callable with its launches named to profilers, where that was asked for and can be had."""
        config, site = self._tracer.config, self._tracer.sites.sites[number]
        if config.kernels:
            from moetrace.instrument.cupti_source import LaunchIds
            from moetrace.instrument.nvtx import ranged

            ids = LaunchIds(number)
            function = ranged(function, site.name, ids.push, ids.pop, self._tracer.guard)
        if config.nvtx:
            from moetrace.instrument.nvtx import label_of, nvtx_functions, ranged

            if self.nvtx is None:
                self.nvtx = nvtx_functions()
            if not isinstance(self.nvtx, str):
                push, pop = self.nvtx
                function = ranged(function, label_of(site), push, pop, self._tracer.guard)
        return function
