"""Launch and wait of one exchange become one interval, where nothing but glue lies between. Pure.

::

    launch, glue, wait         launch, work, wait
    |L|......|WWWW|            |L|  |GEMM|  |WWWW|
    |  exchange   |            |l|          |exch|      l = local work (LAUNCH)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moetrace.record.sites import Role, Site
from moetrace_schemas.columns import RowFlag


class Interval(NamedTuple):
    """One recorded call, marks already resolved to ns on the step's time line."""

    site: Site
    start_ns: int
    end_ns: int
    flags: int = 0
    ticket: int = 0
    """The number that a launch and its wait have in common; 0 for all else."""
    stream: int = 0
    """Where the call's end was marked; 0 is the step's own stream."""


_ASYNC = int(RowFlag.ASYNC)
_LAUNCH = Site(Role.LAUNCH)
_WORK = frozenset((Role.PHASE, Role.EXPERTS, Role.LAYER, Role.EXCHANGE, Role.WAIT))


def in_order(intervals: Iterable[Interval]) -> list[Interval]:
    """By start, the outer one first where several start together; twins stay as they are.

    A zero-length call with a layer of its own comes before what starts with it: it is no part of that.
    """
    return sorted(intervals, key=lambda item: (item.start_ns, not _is_apart(item), -item.end_ns))


def _is_apart(item: Interval) -> bool:
    return item.start_ns == item.end_ns and item.site.layer is not None


def join_waits(ordered: Sequence[Interval]) -> list[Interval]:
    """Intervals in order, without waits: each has become (part of) the exchange that it ended.

    A launch that nobody waited for, and one with work before its wait, end where the call returned;
    the wait is then an exchange of its own, for only its time is exposed.
    """
    waits = {item.ticket: item for item in ordered if item.site.role is Role.WAIT}
    work_starts = [item.start_ns for item in ordered if item.site.role in _WORK]
    result: list[Interval] = []
    open_at: list[int] = []  # positions in `result` of what encloses the current item
    for item in ordered:
        if item.site.role is Role.WAIT:
            continue
        open_at = [at for at in open_at if result[at].end_ns >= item.end_ns]
        wait = waits.get(item.ticket) if item.flags & _ASYNC else None
        if wait is None or wait.end_ns < item.end_ns:
            open_at.append(len(result))
            result.append(item)
            continue
        flags = item.flags | wait.flags
        # Not the launch itself, nor what encloses it, where the launch took no time.
        after = bisect_left(work_starts, max(item.end_ns, item.start_ns + 1))
        if after < len(work_starts) and work_starts[after] < wait.start_ns:
            result.append(Interval(_LAUNCH, item.start_ns, item.end_ns, item.flags))
            result.append(Interval(item.site, wait.start_ns, wait.end_ns, flags))
            continue
        for at in open_at:
            result[at] = _outlived(result[at], item, wait.end_ns)
        result.append(Interval(item.site, item.start_ns, wait.end_ns, flags))
    return in_order(result)


def _outlived(outer: Interval, launch: Interval, end_ns: int) -> Interval:
    """What encloses a launch, given that the exchange went on to `end_ns`."""
    if outer.end_ns >= end_ns:
        return outer
    if outer.site.role is Role.EXCHANGE:
        # A wrapper around the launch is local work before it.
        return Interval(_LAUNCH, outer.start_ns, launch.start_ns, outer.flags)
    return outer._replace(end_ns=end_ns)
