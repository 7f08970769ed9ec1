"""Nested intervals of one step -> phase rows that tile the step. Pure; runs in the drain thread.

Wrapped callables nest, and only the innermost one that covers an instant says what the rank does:

::

    step      |--------------------------------------------------------------|
    layer 0        |------------------------------------------------|
    permute              |-----------------|
    exchange                  |--------|
    experts                                 |--------|
    exchange                                             |-----|
    rows      outside |R | P  | dispatch |P |  GEMM  |U| combine|U | outside |

Rules for what no wrapped phase covers:

* before a layer's first part, after its last and between layers: `outside` of the next layer, and of
  layer -1 behind the last MoE layer of the step; but `unpermute` inside a block behind its combine;
* between two parts of a layer: `permute` up to the experts, `unpermute` after them, where the layer
  exchanges rows or shows a permute of its own; `fused` where it does not;
* an exchange is a barrier: `dispatch` before the layer's experts, `combine` after them. A phase
  `dispatch` or `combine` that contains an exchange is local work around it; one that contains none
  is the barrier itself;
* an exchange that contains another one is a wrapper of it: local work of the same phase;
* an exchange that returned at launch lasts until the end of its wait when nothing but glue lies
  between; otherwise only its wait is exposed, and the time between belongs to what ran there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from moetrace.record.backward import BACKWARD, backward_segments, split_directions, within
from moetrace.record.exchanges import Interval, join_waits
from moetrace.record.layer_pass import Segment, layer_segments
from moetrace.record.nesting import clip, nest, passes
from moetrace.record.side_streams import side_segments
from moetrace.record.sites import STEP_LEVEL
from moetrace.record.types import PhaseRow
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Direction, Phase

_BARRIER, _RECOMPUTE = int(RowFlag.BARRIER), int(RowFlag.RECOMPUTE)


def assemble(
    intervals: Sequence[Interval], start_ns: int, end_ns: int, *, microbatch: int = 0
) -> tuple[PhaseRow, ...]:
    """Rows of stream 0 that tile [start_ns, end_ns] without gap or overlap, and beside them those of others.

    Intervals may come in any order (of two with the same times, the later one is the outer) and are
    clipped to the step; ones that overlap without nesting (two threads at once) are cut at the end of
    the earlier one.
    """
    own = [item for item in intervals if item.stream == 0]
    forward, backward = split_directions(join_waits(clip(own, start_ns, end_ns)))
    back = backward_segments(backward)
    segments: list[Segment] = []
    cursor = start_ns
    for node in passes(nest(forward)):
        segments.extend(_between(cursor, node.interval.start_ns, back))
        segments.extend(layer_segments(node))
        cursor = max(cursor, node.interval.end_ns)
    segments.extend(_between(cursor, end_ns, back))
    merged = _merge(segments)
    if len(own) < len(intervals):
        merged.extend(side_segments(intervals, start_ns, end_ns))
        merged.sort(key=lambda segment: segment.start_ns)
    return _rows(merged, start_ns, microbatch)


def _between(start_ns: int, end_ns: int, back: list[Segment]) -> list[Segment]:
    """What no pass of the forward or of recompute covers: backward passes, and `outside` around them."""
    result: list[Segment] = []
    cursor = start_ns
    for segment in within(back, start_ns, end_ns) if start_ns < end_ns else ():
        if segment.start_ns > cursor:
            result.append(_outside(cursor, segment.start_ns, back))
        result.append(segment)
        cursor = segment.end_ns
    if end_ns > cursor:
        result.append(_outside(cursor, end_ns, back))
    return result


def _outside(start_ns: int, end_ns: int, back: list[Segment]) -> Segment:
    """Time of no MoE layer; of the backward pass, where that goes on behind it."""
    inside = bool(back) and start_ns >= back[0].end_ns and end_ns <= back[-1].start_ns
    return Segment(start_ns, end_ns, None, Phase.OUTSIDE, BACKWARD if inside else 0)


def _merge(segments: list[Segment]) -> list[Segment]:
    """Gives `outside` the number of the layer that follows, then joins neighbours of one kind."""
    following = STEP_LEVEL
    for segment in reversed(segments):
        if segment.layer is None:
            segment.layer = following
        elif segment.phase is not Phase.OUTSIDE:
            following = segment.layer
    merged: list[Segment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        if (
            last is not None
            and not segment.flags & _BARRIER
            and (last.layer, last.phase, last.flags) == (segment.layer, segment.phase, segment.flags)
            and last.end_ns == segment.start_ns
        ):
            last.end_ns = segment.end_ns
        else:
            merged.append(segment)
    return merged


def _rows(segments: list[Segment], origin_ns: int, microbatch: int) -> tuple[PhaseRow, ...]:
    ordinals: defaultdict[tuple[int, Phase, Direction, bool], int] = defaultdict(int)
    rows = []
    for segment in segments:
        is_backward = segment.flags & (_RECOMPUTE | BACKWARD)
        direction = Direction.BACKWARD if is_backward else Direction.FORWARD
        layer = STEP_LEVEL if segment.layer is None else segment.layer
        assert segment.phase is not None
        key = (layer, segment.phase, direction, bool(segment.flags & _BARRIER))
        rows.append(
            PhaseRow(
                layer=layer,
                phase=segment.phase,
                direction=direction,
                microbatch=microbatch,
                ordinal=ordinals[key],
                stream=segment.stream,
                flags=segment.flags & ~BACKWARD,
                start_offset_ns=segment.start_ns - origin_ns,
                duration_ns=segment.end_ns - segment.start_ns,
            )
        )
        ordinals[key] += 1
    return tuple(rows)
