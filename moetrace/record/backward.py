"""Backward intervals of one step -> segments. Pure; runs in the drain thread.

Backward runs through a layer in the other order, so it is the forward of a mirrored clock: intervals are
mirrored, named by the rules of the forward pass, and mirrored back::

    time      |== unpermute ==|= combine =|== experts ==|= dispatch =|= permute =|= router =|
    mirrored  |= router =|= permute =|= dispatch =|== experts ==|= combine =|== unpermute ==|

Activation recompute runs inside backward, and its passes are cut out of what encloses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from moetrace.record.exchanges import Interval, in_order
from moetrace.record.layer_pass import Segment, layer_segments
from moetrace.record.nesting import nest, passes
from moetrace.record.sites import Role
from moetrace_schemas.columns import RowFlag

BACKWARD = 1 << 15
"""Flag of an interval between autograd boundaries; becomes the row's direction and is not on the wire."""

_RECOMPUTE = int(RowFlag.RECOMPUTE)
_EXCHANGES = (Role.EXCHANGE, Role.LAUNCH)


def split_directions(ordered: Sequence[Interval]) -> tuple[list[Interval], list[Interval]]:
    """(forward and recompute, backward) of intervals in order.

    A collective called inside a backward interval belongs to recompute where a recomputed call encloses
    it, and to backward itself where none does.
    """
    forward: list[Interval] = []
    backward: list[Interval] = []
    backward_until = recompute_until = None
    for item in ordered:
        if item.flags & BACKWARD:
            backward_until = _later(backward_until, item.end_ns)
            backward.append(item)
            continue
        recomputed = recompute_until is not None and item.end_ns <= recompute_until
        if item.flags & _RECOMPUTE and not recomputed:
            if item.site.role not in _EXCHANGES:
                recompute_until = _later(recompute_until, item.end_ns)
            elif backward_until is not None and item.end_ns <= backward_until:
                backward.append(item._replace(flags=item.flags & ~_RECOMPUTE))
                continue
        forward.append(item)
    return forward, backward


def _later(one_ns: int | None, other_ns: int) -> int:
    return other_ns if one_ns is None else max(one_ns, other_ns)


def backward_segments(intervals: Iterable[Interval]) -> list[Segment]:
    """Named segments of backward passes, by start; they do not overlap."""
    mirrored = in_order(
        item._replace(start_ns=-item.end_ns, end_ns=-item.start_ns, flags=item.flags & ~BACKWARD)
        for item in intervals
    )
    segments = [
        replace(segment, start_ns=-segment.end_ns, end_ns=-segment.start_ns, flags=segment.flags | BACKWARD)
        for node in passes(nest(mirrored))
        for segment in layer_segments(node)
    ]
    return sorted(segments, key=lambda segment: (segment.start_ns, segment.end_ns))


def within(segments: Iterable[Segment], start_ns: int, end_ns: int) -> list[Segment]:
    """What lies between two times, cut where it reaches beyond them."""
    return [
        replace(segment, start_ns=max(segment.start_ns, start_ns), end_ns=min(segment.end_ns, end_ns))
        for segment in segments
        if segment.end_ns > start_ns and segment.start_ns < end_ns
    ]
