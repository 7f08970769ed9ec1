"""Intervals of one step -> passes through MoE layers, as trees. Pure; runs in the drain thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moetrace.record.exchanges import Interval, in_order
from moetrace.record.sites import STEP_LEVEL, Role, Site
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Phase

HANDED_DOWN = int(RowFlag.RECOMPUTE | RowFlag.CAPTURED)
"""Flags that a pass through a layer hands on to the glue between its parts."""


@dataclass(slots=True)
class Node:
    """An interval and what it encloses, in order."""

    interval: Interval
    layer: int | None
    children: list[Node] = field(default_factory=list)

    @property
    def role(self) -> Role:
        """The site's role."""
        return self.interval.site.role

    def walk(self) -> Iterator[Node]:
        """All nodes below this one."""
        for child in self.children:
            yield child
            yield from child.walk()

    def contains(self, *roles: Role) -> bool:
        """Whether a node of one of these roles is below this one."""
        return any(node.role in roles for node in self.walk())

    @property
    def is_barrier_phase(self) -> bool:
        """Whether this is a phase `dispatch` or `combine` that is the exchange itself, not work beside it."""
        barrier = self.interval.site.phase in (Phase.DISPATCH, Phase.COMBINE)
        return self.role is Role.PHASE and barrier and not self.contains(Role.EXCHANGE, Role.LAUNCH)


def clip(intervals: Sequence[Interval], start_ns: int, end_ns: int) -> list[Interval]:
    """What lies within the step, by start, outer before inner."""
    inside = [
        item
        if item.start_ns >= start_ns and item.end_ns <= end_ns
        else item._replace(start_ns=max(item.start_ns, start_ns), end_ns=min(item.end_ns, end_ns))
        for item in intervals
        if item.start_ns <= item.end_ns and item.end_ns >= start_ns and item.start_ns <= end_ns
    ]
    # A buffer keeps calls in order of their end: of two with the same times, the later one is the outer,
    # unless they took no time at all.
    instants = [item for item in inside if item.start_ns == item.end_ns]
    return in_order(instants + [item for item in reversed(inside) if item.start_ns != item.end_ns])


def nest(ordered: Sequence[Interval]) -> list[Node]:
    """Trees of the intervals that belong to a layer; each node lies within its parent."""
    roots: list[Node] = []
    stack: list[Node] = []
    for interval in ordered:
        while stack and not _lies_in(interval, stack[-1].interval):
            stack.pop()
        if stack and interval.end_ns > stack[-1].interval.end_ns:
            # Overlap without nesting (two threads at once): cut at the end of the earlier one.
            interval = interval._replace(end_ns=stack[-1].interval.end_ns)
        layer = interval.site.layer
        if layer is None and stack:
            layer = stack[-1].layer
        elif layer is None and interval.site.alone:
            layer = STEP_LEVEL
        node = Node(interval, layer)
        (stack[-1].children if stack else roots).append(node)
        stack.append(node)
    # A collective outside every MoE layer is none of ours: its time stays `outside`.
    return [node for node in roots if node.layer is not None]


def _lies_in(interval: Interval, outer: Interval) -> bool:
    """Whether an interval that starts no earlier than `outer` starts within it."""
    if interval.start_ns < outer.end_ns:
        return True
    # A zero-length call at the very end of its parent still belongs to it.
    return interval.end_ns == interval.start_ns == outer.end_ns and interval.site.layer is None


def passes(roots: Sequence[Node]) -> list[Node]:
    """Passes through layers; hand-wrapped phases that no block encloses are gathered into one each.

    A pass ends where another layer starts, where a router starts anew, or behind a combine or an
    unpermute when something follows that cannot come after it.
    """
    result: list[Node] = []
    seen: set[Phase | None] = set()
    for node in roots:
        phase = node.interval.site.phase
        last = result[-1] if result else None
        if last is not None and seen and _continues(node, last, seen):
            last.children.append(node)
            last.interval = last.interval._replace(end_ns=node.interval.end_ns)
            seen.add(phase)
        elif node.role is Role.LAYER:
            result.append(node)
            seen = set()
        else:
            site, flags = Site(Role.LAYER, layer=node.layer), node.interval.flags & HANDED_DOWN
            block = Interval(site, node.interval.start_ns, node.interval.end_ns, flags)
            result.append(Node(block, node.layer, [node]))
            seen = {phase}
    return result


def _continues(node: Node, block: Node, seen: set[Phase | None]) -> bool:
    """Whether a phase can belong to the hand-wrapped pass `block`, in which `seen` came before it."""
    phase = node.interval.site.phase
    if node.layer != block.layer or node.role is Role.LAYER or phase is Phase.ROUTER:
        return False
    if (node.interval.flags ^ block.interval.flags) & HANDED_DOWN:
        return False
    if Phase.COMBINE in seen:
        return phase in (Phase.UNPERMUTE, Phase.SHARED_EXPERT)
    if Phase.UNPERMUTE in seen:
        return phase in (Phase.COMBINE, Phase.UNPERMUTE, Phase.SHARED_EXPERT)
    return True
