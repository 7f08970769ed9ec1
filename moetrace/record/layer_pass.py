"""One pass through a MoE layer -> segments by phase. Pure; runs in the drain thread.

Wrapped callables nest, and only the innermost one that covers an instant says what the rank does.
The rules for what no wrapped phase covers are those of moetrace.record.assemble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moetrace.record.nesting import HANDED_DOWN, Node
from moetrace.record.sites import Role
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Phase

_EXCHANGE_OF: dict[Phase | None, Phase] = {
    Phase.PERMUTE: Phase.DISPATCH,
    Phase.DISPATCH: Phase.DISPATCH,
    Phase.UNPERMUTE: Phase.COMBINE,
    Phase.COMBINE: Phase.COMBINE,
}
"""What an exchange inside a phase is."""
_BARRIER, _ASYNC, _ERROR = int(RowFlag.BARRIER), int(RowFlag.ASYNC), int(RowFlag.ERROR)
_KEPT = int(RowFlag.ERROR | RowFlag.RECOMPUTE | RowFlag.CAPTURED)
"""Flags that a call hands on to its time."""


@dataclass(slots=True)
class Segment:
    """A stretch of time under one name; becomes a row."""

    start_ns: int
    end_ns: int
    layer: int | None
    """None: outside, of the next layer that shows."""
    phase: Phase | None
    """None: glue between a layer's parts, named once the whole pass is known."""
    flags: int = 0
    stream: int = 0


def layer_segments(node: Node) -> list[Segment]:
    """Segments of one pass: a MoE block, or hand-wrapped phases gathered into one."""
    walk = _Walk(node)
    walk.visit(node, None)
    return _name_glue(walk.segments, node)


class _Walk:
    """Collects segments in order of time."""

    def __init__(self, node: Node) -> None:
        self.segments: list[Segment] = []
        self._seen_experts = False
        self._handed_down = node.interval.flags & HANDED_DOWN

    def visit(self, node: Node, enclosing: Phase | None) -> None:
        """Add the segments of a call; `enclosing` is the phase around it."""
        role, kept = node.role, node.interval.flags & _KEPT
        if role in (Role.EXCHANGE, Role.LAUNCH):
            self._exchange(node, enclosing, kept)
        elif role is Role.LAYER:
            # A block whose parts are no calls of their own says what its own time is.
            self._inside(node, node.interval.site.phase, self._handed_down)
        elif role is Role.EXPERTS:
            self._experts(node, kept)
        else:
            phase = node.interval.site.phase or Phase.FUSED
            if node.is_barrier_phase:
                self._add(node.interval.start_ns, node.interval.end_ns, phase, node, kept | _BARRIER)
            else:
                self._inside(node, phase, kept)
            self._seen_experts |= phase in (Phase.EXPERT_GEMM, Phase.FUSED)

    def _exchange(self, node: Node, enclosing: Phase | None, kept: int) -> None:
        phase = _EXCHANGE_OF.get(enclosing, Phase.COMBINE if self._seen_experts else Phase.DISPATCH)
        if node.role is Role.LAUNCH or node.contains(Role.EXCHANGE):
            self._inside(node, phase, kept)
            return
        flags = kept | _BARRIER | (node.interval.flags & _ASYNC)
        self._add(node.interval.start_ns, node.interval.end_ns, phase, node, flags)

    def _experts(self, node: Node, kept: int) -> None:
        if any(child.role is Role.EXCHANGE or child.is_barrier_phase for child in node.walk()):
            # The call that holds the whole exchange: its own time is glue between its parts.
            self._inside(node, None, self._handed_down)
            return
        self._seen_experts = True
        start, end = node.interval.start_ns, node.interval.end_ns
        if not node.children:
            self._add(start, end, node.interval.site.phase or Phase.FUSED, node, kept)
            return
        first, last = node.children[0].interval.start_ns, node.children[-1].interval.end_ns
        self._add(start, first, Phase.PERMUTE, node, kept & ~_ERROR)
        self._add(first, last, Phase.EXPERT_GEMM, node, kept)
        self._add(last, end, Phase.UNPERMUTE, node, kept & ~_ERROR)

    def _inside(self, node: Node, phase: Phase | None, flags: int) -> None:
        """Children, and the call's own time between them under `phase`."""
        cursor = node.interval.start_ns
        for child in node.children:
            self._add(cursor, child.interval.start_ns, phase, node, flags)
            self.visit(child, phase)
            cursor = max(cursor, child.interval.end_ns)
        self._add(cursor, node.interval.end_ns, phase, node, flags)

    def _add(self, start: int, end: int, phase: Phase | None, node: Node, flags: int) -> None:
        if end > start or flags & _BARRIER:
            self.segments.append(Segment(start, end, node.layer, phase, flags))


def _name_glue(segments: Sequence[Segment], node: Node) -> list[Segment]:
    """Names the glue between a layer's parts; glue at its edges is `outside`."""
    named = [at for at, segment in enumerate(segments) if segment.phase is not None]
    if not named:
        # A layer of which no part was seen: its time is real, but cannot be told apart.
        start, end = node.interval.start_ns, node.interval.end_ns
        flags = node.interval.flags & _KEPT
        return [Segment(start, end, node.layer, Phase.FUSED, flags)] if end > start else []
    experts = [at for at in named if segments[at].phase in (Phase.EXPERT_GEMM, Phase.FUSED)]
    told_apart = any(segment.phase is Phase.PERMUTE or segment.flags & _BARRIER for segment in segments)
    routers = [at for at in named if segments[at].phase is Phase.ROUTER]
    routed = routers[-1] if routers and routers == named[: len(routers)] else -1
    for at, segment in enumerate(segments):
        if segment.phase is not None:
            continue
        if at > named[-1] and segments[named[-1]].phase is Phase.COMBINE:
            # A block whose last call is the exchange still has to restore the order of tokens.
            segment.phase = Phase.UNPERMUTE
        elif at < named[0] or at > named[-1]:
            segment.phase, segment.layer = Phase.OUTSIDE, None
        elif at < routed:
            # A router of several calls (logits, then top-k).
            segment.phase = Phase.ROUTER
        elif not told_apart:
            segment.phase = Phase.FUSED
        elif experts and at > experts[-1]:
            segment.phase = Phase.UNPERMUTE
        else:
            segment.phase = Phase.PERMUTE
    return list(segments)
