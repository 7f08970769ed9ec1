"""Intervals of other streams than the step's own -> segments that lie beside its time line. Pure.

A shared expert or a collective on a stream of its own runs while the step's stream goes on. Its rows
carry the stream's number and overlap those of stream 0; how much of them is exposed is worked out once,
by the reader (moetrace_collectors.verdict.overlap).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from moetrace.record.exchanges import Interval, join_waits
from moetrace.record.layer_pass import Segment, layer_segments
from moetrace.record.nesting import clip, nest, passes
from moetrace_schemas.enums import Phase


def side_segments(intervals: Sequence[Interval], start_ns: int, end_ns: int) -> list[Segment]:
    """Named segments of all streams but 0, each with its stream."""
    starts = sorted(
        (item.start_ns, item.site.layer)
        for item in intervals
        if item.stream == 0 and item.site.layer is not None
    )
    result: list[Segment] = []
    for stream in sorted({item.stream for item in intervals} - {0}):
        own = [_with_layer(item, starts) for item in intervals if item.stream == stream]
        for node in passes(nest(join_waits(clip(own, start_ns, end_ns)))):
            result.extend(_named(layer_segments(node), stream))
    return result


def _named(segments: Iterable[Segment], stream: int) -> Iterable[Segment]:
    # Nothing is known of a side stream between its calls.
    return [replace(item, stream=stream) for item in segments if item.phase is not Phase.OUTSIDE]


def _with_layer(item: Interval, starts: list[tuple[int, int]]) -> Interval:
    """A collective without a layer belongs to the layer that began last on the step's own stream."""
    if item.site.layer is not None:
        return item
    at = bisect_right(starts, item.start_ns, key=lambda start: start[0])
    return item._replace(site=replace(item.site, layer=starts[at - 1][1])) if at else item
