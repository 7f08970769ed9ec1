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
  layer -1 behind the last MoE layer of the step;
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
from dataclasses import dataclass, field

from moetrace.record.sites import Role, Site
from moetrace.record.types import PhaseRow
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Direction, Phase

STEP_LEVEL = -1
"""Layer number of rows that belong to no MoE layer."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One recorded call, marks already resolved to ns on the step's time line."""

    site: Site
    start_ns: int
    end_ns: int
    flags: int = 0


@dataclass(slots=True)
class _Node:
    interval: Interval
    layer: int | None
    children: list[_Node] = field(default_factory=list)

    @property
    def role(self) -> Role:
        return self.interval.site.role


@dataclass(slots=True)
class _Segment:
    start_ns: int
    end_ns: int
    layer: int | None
    """None: outside, of the next layer that shows."""
    phase: Phase
    flags: int


def assemble(
    intervals: Sequence[Interval], start_ns: int, end_ns: int, *, microbatch: int = 0
) -> tuple[PhaseRow, ...]:
    """Rows that tile [start_ns, end_ns] without gap or overlap, in order of start.

    Intervals may come in any order and are clipped to the step; ones that overlap without nesting
    (two threads at once) are cut at the end of the earlier one.
    """
    segments: list[_Segment] = []
    cursor = start_ns
    for node in _group(_tree(_join_waits(_clip(intervals, start_ns, end_ns)))):
        node_start = node.interval.start_ns
        if node_start > cursor:
            segments.append(_outside(cursor, node_start))
        segments.extend(_layer_segments(node))
        cursor = max(cursor, node.interval.end_ns)
    if end_ns > cursor:
        segments.append(_outside(cursor, end_ns))
    return _rows(_merge(segments), start_ns, microbatch)


def _outside(start_ns: int, end_ns: int) -> _Segment:
    return _Segment(start_ns, end_ns, None, Phase.OUTSIDE, 0)


def _clip(intervals: Sequence[Interval], start_ns: int, end_ns: int) -> list[Interval]:
    clipped = []
    for interval in intervals:
        low, high = max(interval.start_ns, start_ns), min(interval.end_ns, end_ns)
        if low <= high and interval.start_ns <= interval.end_ns:
            clipped.append(Interval(interval.site, low, high, interval.flags))
    # Outer before inner where both start together; a zero-length twin stays inside.
    clipped.sort(key=lambda item: (item.start_ns, -item.end_ns))
    return clipped


def _join_waits(intervals: list[Interval]) -> list[Interval]:
    """Launch and wait of one exchange become one interval, or the wait alone where work lies between."""
    result: list[Interval] = []
    launch: Interval | None = None
    for interval in intervals:
        role = interval.site.role
        if role is Role.EXCHANGE and interval.flags & RowFlag.ASYNC:
            if launch is not None:
                result.append(launch)
            launch = interval
            continue
        if role is Role.WAIT:
            if launch is None:
                continue
            if _work_since(result, launch.end_ns):
                result.append(Interval(_LAUNCH, launch.start_ns, launch.end_ns, launch.flags))
                result.append(Interval(launch.site, interval.start_ns, interval.end_ns, launch.flags))
            else:
                _end_wrappers_at(result, launch)
                result.append(Interval(launch.site, launch.start_ns, interval.end_ns, launch.flags))
            launch = None
            continue
        result.append(interval)
    if launch is not None:
        result.append(launch)
    result.sort(key=lambda item: (item.start_ns, -item.end_ns))
    return result


_LAUNCH = Site(Role.LAUNCH)


def _end_wrappers_at(intervals: list[Interval], launch: Interval) -> None:
    """Cut wrappers around a launch where it starts: the exchange outlives them."""
    for index, outer in enumerate(intervals):
        if (
            outer.site.role is Role.EXCHANGE
            and outer.start_ns <= launch.start_ns
            and outer.end_ns >= launch.end_ns
        ):
            intervals[index] = Interval(_LAUNCH, outer.start_ns, launch.start_ns, outer.flags)


def _work_since(intervals: list[Interval], since_ns: int) -> bool:
    """Whether a phase started after `since_ns`; `intervals` are in order of start."""
    for interval in reversed(intervals):
        if interval.start_ns < since_ns:
            return False
        if interval.site.role in (Role.PHASE, Role.EXPERTS):
            return True
    return False


def _tree(intervals: Sequence[Interval]) -> list[_Node]:
    roots: list[_Node] = []
    stack: list[_Node] = []
    for interval in intervals:
        while (
            stack
            and stack[-1].interval.end_ns <= interval.start_ns
            and not (
                # A zero-length call at the very end of its parent still belongs to it.
                interval.end_ns == interval.start_ns == stack[-1].interval.end_ns
                and interval.site.layer is None
            )
        ):
            stack.pop()
        if stack and interval.end_ns > stack[-1].interval.end_ns:
            interval = Interval(interval.site, interval.start_ns, stack[-1].interval.end_ns, interval.flags)
        own = interval.site.layer
        inherited = stack[-1].layer if stack else None
        node = _Node(interval, own if own is not None else inherited)
        (stack[-1].children if stack else roots).append(node)
        stack.append(node)
    # A collective outside every MoE layer is none of ours: its time stays `outside`.
    return [node for node in roots if node.layer is not None]


def _group(roots: Sequence[_Node]) -> list[_Node]:
    """Hand-wrapped phases that no block encloses, gathered into one layer pass each.

    A pass ends where another layer starts, where a router starts anew, or behind a combine when
    something other than an unpermute or shared expert follows.
    """
    groups: list[_Node] = []
    open_phases: list[Phase | None] = []
    for node in roots:
        phase = node.interval.site.phase
        last = groups[-1] if groups else None
        continues = (
            last is not None
            and open_phases
            and node.role is not Role.LAYER
            and last.layer == node.layer
            and phase is not Phase.ROUTER
            and (open_phases[-1] is not Phase.COMBINE or phase in _AFTER_COMBINE)
        )
        if last is not None and continues:
            last.children.append(node)
            last.interval = Interval(last.interval.site, last.interval.start_ns, node.interval.end_ns)
            open_phases.append(phase)
        elif node.role is Role.LAYER:
            groups.append(node)
            open_phases = []
        else:
            site = Site(Role.LAYER, layer=node.layer)
            span = Interval(site, node.interval.start_ns, node.interval.end_ns)
            groups.append(_Node(span, node.layer, [node]))
            open_phases = [phase]
    return groups


_AFTER_COMBINE = (Phase.UNPERMUTE, Phase.SHARED_EXPERT)


def _contains(node: _Node, *roles: Role) -> bool:
    return any(child.role in roles or _contains(child, *roles) for child in node.children)


def _layer_segments(node: _Node) -> list[_Segment]:
    """Segments of one top-level node: a MoE block, or a phase of hand-wrapped code."""
    flat: list[_Segment | None] = []  # None marks glue that has no phase yet, resolved below
    glue: list[tuple[int, int]] = []
    seen_experts = False
    exchanges = (
        _contains(node, Role.EXCHANGE)
        or _is_barrier_phase(node)
        or any(_is_barrier_phase(child) for child in _walk(node))
    )

    def emit(start: int, end: int, phase: Phase, layer: int | None, flags: int = 0) -> None:
        if end > start or flags & RowFlag.BARRIER:
            flat.append(_Segment(start, end, layer, phase, flags))

    def emit_glue(start: int, end: int) -> None:
        if end > start:
            flat.append(None)
            glue.append((start, end))

    def visit(item: _Node, enclosing: Phase | None) -> None:
        nonlocal seen_experts
        interval, role = item.interval, item.role
        kept = interval.flags & (RowFlag.ERROR | RowFlag.RECOMPUTE | RowFlag.CAPTURED)
        if role in (Role.EXCHANGE, Role.WAIT, Role.LAUNCH):
            phase = _EXCHANGE_OF.get(enclosing, Phase.COMBINE if seen_experts else Phase.DISPATCH)
            if role is Role.LAUNCH or _contains(item, Role.EXCHANGE):
                children_and_glue(item, phase, kept)
                return
            flags = RowFlag.BARRIER | kept | (interval.flags & RowFlag.ASYNC)
            emit(interval.start_ns, interval.end_ns, phase, item.layer, flags)
            return
        if role is Role.EXPERTS:
            if _contains(item, Role.EXCHANGE) or any(_is_barrier_phase(n) for n in _walk(item)):
                children_and_glue(item, None)
            else:
                experts(item, kept)
                seen_experts = True
            return
        if role is Role.LAYER:
            children_and_glue(item, None)
            return
        phase = interval.site.phase or Phase.FUSED
        if _is_barrier_phase(item):
            emit(interval.start_ns, interval.end_ns, phase, item.layer, RowFlag.BARRIER | kept)
        else:
            children_and_glue(item, phase, kept)
        if phase in (Phase.EXPERT_GEMM, Phase.FUSED):
            seen_experts = True

    def children_and_glue(item: _Node, phase: Phase | None, flags: int = 0) -> None:
        cursor = item.interval.start_ns
        for child in item.children:
            gap(cursor, child.interval.start_ns, phase, item.layer, flags)
            visit(child, phase)
            cursor = max(cursor, child.interval.end_ns)
        gap(cursor, item.interval.end_ns, phase, item.layer, flags)

    def gap(start: int, end: int, phase: Phase | None, layer: int | None, flags: int) -> None:
        if phase is None:
            emit_glue(start, end)
        else:
            emit(start, end, phase, layer, flags)

    def experts(item: _Node, flags: int) -> None:
        interval = item.interval
        if not item.children:
            emit(interval.start_ns, interval.end_ns, interval.site.phase or Phase.FUSED, item.layer, flags)
            return
        first, last = item.children[0].interval.start_ns, item.children[-1].interval.end_ns
        emit(interval.start_ns, first, Phase.PERMUTE, item.layer, flags)
        emit(first, last, Phase.EXPERT_GEMM, item.layer, flags)
        emit(last, interval.end_ns, Phase.UNPERMUTE, item.layer, flags)

    visit(node, None)
    return _resolve_glue(flat, glue, node.layer, exchanges)


_EXCHANGE_OF: dict[Phase | None, Phase] = {
    Phase.PERMUTE: Phase.DISPATCH,
    Phase.DISPATCH: Phase.DISPATCH,
    Phase.UNPERMUTE: Phase.COMBINE,
    Phase.COMBINE: Phase.COMBINE,
}
"""What an exchange inside a phase is."""


def _walk(node: _Node) -> list[_Node]:
    return [found for child in node.children for found in (child, *_walk(child))]


def _is_barrier_phase(node: _Node) -> bool:
    return (
        node.role is Role.PHASE
        and node.interval.site.phase in (Phase.DISPATCH, Phase.COMBINE)
        and not _contains(node, Role.EXCHANGE)
    )


def _resolve_glue(
    flat: list[_Segment | None], glue: list[tuple[int, int]], layer: int | None, exchanges: bool
) -> list[_Segment]:
    """Names the glue between a layer's parts; glue at its edges is `outside`."""
    parts = [i for i, segment in enumerate(flat) if segment is not None]
    if not parts:
        start, end = (glue[0][0], glue[-1][1]) if glue else (0, 0)
        # A layer of which no part was seen: its time is real, but cannot be told apart.
        return [_Segment(start, end, layer, Phase.FUSED, 0)] if end > start else []
    experts_at = [
        i for i in parts if (segment := flat[i]) and segment.phase in (Phase.EXPERT_GEMM, Phase.FUSED)
    ]
    split = any(segment is not None and segment.phase is Phase.PERMUTE for segment in flat)
    remaining = iter(glue)
    resolved: list[_Segment] = []
    for index, segment in enumerate(flat):
        if segment is not None:
            resolved.append(segment)
            continue
        start, end = next(remaining)
        if index < parts[0] or index > parts[-1]:
            resolved.append(_outside(start, end))
        elif not (exchanges or split):
            resolved.append(_Segment(start, end, layer, Phase.FUSED, 0))
        elif experts_at and index > experts_at[-1]:
            resolved.append(_Segment(start, end, layer, Phase.UNPERMUTE, 0))
        else:
            resolved.append(_Segment(start, end, layer, Phase.PERMUTE, 0))
    return resolved


def _merge(segments: list[_Segment]) -> list[_Segment]:
    """Gives `outside` the number of the layer that follows, then joins neighbours of one kind."""
    following: int | None = STEP_LEVEL
    for segment in reversed(segments):
        if segment.layer is None:
            segment.layer = following
        elif segment.phase is not Phase.OUTSIDE:
            following = segment.layer
    merged: list[_Segment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        if (
            last is not None
            and not segment.flags & RowFlag.BARRIER
            and (last.layer, last.phase, last.flags) == (segment.layer, segment.phase, segment.flags)
            and last.end_ns == segment.start_ns
        ):
            last.end_ns = segment.end_ns
        else:
            merged.append(segment)
    return merged


def _rows(segments: list[_Segment], origin_ns: int, microbatch: int) -> tuple[PhaseRow, ...]:
    ordinals: defaultdict[tuple[int, Phase, Direction, bool], int] = defaultdict(int)
    rows = []
    for segment in segments:
        direction = Direction.BACKWARD if segment.flags & RowFlag.RECOMPUTE else Direction.FORWARD
        layer = STEP_LEVEL if segment.layer is None else segment.layer
        key = (layer, segment.phase, direction, bool(segment.flags & RowFlag.BARRIER))
        rows.append(
            PhaseRow(
                layer=layer,
                phase=segment.phase,
                direction=direction,
                microbatch=microbatch,
                ordinal=ordinals[key],
                stream=0,
                flags=segment.flags,
                start_offset_ns=segment.start_ns - origin_ns,
                duration_ns=segment.end_ns - segment.start_ns,
            )
        )
        ordinals[key] += 1
    return tuple(rows)
