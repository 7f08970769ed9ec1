"""Activation recompute inside a compiled graph: marks around what the graph of the backward computes again.

A checkpoint in a compiled region is no call when it is recomputed: the partitioner copies those nodes of the
forward that the backward needs into its graph, next to what needs them. So the nodes of each wrapped call
are labelled while forward and backward are traced, and once the backward has its final order, stretches of
labelled nodes get marks::

    traced      begin experts | mm  silu  mm | end experts        labels: mm silu mm are of experts
    backward    .. grad | mm  silu | grad grad | mm  topk | grad ..
    marked      .. grad [ mm  silu ] grad grad [ mm  topk ] grad ..      of experts, and of the router

Only stretches with an operation of some weight (a product, a sort, an exchange) are marked: cheaper ones are
fused into the backward. Nothing is computed that would not be: marks read what is there. Expert ids that are
computed again are noted as pairs of recompute.

The order is final where torch has put it right for checkpoints, in a function of its partitioner; where that
cannot be extended, recompute is part of the backward phases.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Iterable
from typing import Any

import torch

from moetrace.instrument.graph_calls import WITH_TENSORS
from moetrace.instrument.recorders import find

logger = logging.getLogger("moetrace")

CALLS = "moetrace_calls"
"""Key of a node's `meta`: the (recorder, site) of the wrapped calls around it, outermost first."""
COUNTS = "moetrace_counts"
"""Key of a node's `meta`: (name of the op, recorder, index, further arguments) of what counts it."""
_LIGHT = frozenset(
    f"aten::{name}"
    for name in (
        *("clone", "detach", "alias", "_unsafe_view", "_to_copy", "scalar_tensor", "arange"),
        *("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones"),
    )
)
"""Operations without weight that are neither views nor tagged as pointwise."""
_registered = False

Call = tuple[int, int]


def label_calls(graph: Any) -> None:
    """Note at the nodes of a forward graph in which wrapped calls they are, and what is counted of them."""
    marks = torch.ops.moetrace
    calls: list[Call] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        op = node.args[1] if _is_effect(node) else None
        if op is marks.begin.default:
            calls.append((node.args[-2], node.args[-1]))
        elif op is marks.end.default:
            ended = (node.args[-2], node.args[-1])
            if ended in calls:
                # What a failed call left open lies above the mark that belongs to this end.
                while calls.pop() != ended:
                    pass
        elif op is not None:
            _label_count(node, op)
        elif calls:
            node.meta[CALLS] = tuple(calls)


def _is_effect(node: Any) -> bool:
    from torch._higher_order_ops.effects import with_effects

    return node.target is with_effects


def _label_count(node: Any, op: Any) -> None:
    for name in WITH_TENSORS:
        if op is getattr(torch.ops.moetrace, name).default:
            counted, key, index, *further = node.args[2:]
            while counted.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                counted = counted.args[0]
            # Graphs are copied by name: what is no number goes by that.
            names = tuple(getattr(item, "name", item) for item in further)
            counted.meta[COUNTS] = (*counted.meta.get(COUNTS, ()), (name, key, index, names))


def register_with_partitioner() -> None:
    """Have marks put into graphs of the backward, where torch lets that be. Never raises."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        from torch._functorch import partitioners

        module: Any = partitioners
        reorder = module.reordering_to_mimic_autograd_engine
    except (ImportError, AttributeError) as error:
        logger.info("moetrace: recompute in compiled graphs counts as backward (%s)", error)
        return

    @functools.wraps(reorder)
    def reorder_and_mark(graph_module: Any, *args: Any, **kwargs: Any) -> Any:
        result = reorder(graph_module, *args, **kwargs)
        keys = {node.meta[CALLS][-1][0] for node in result.graph.nodes if CALLS in node.meta}
        if keys:
            try:
                mark_recompute(result)
            except Exception as error:  # noqa: BLE001 - nothing of ours may reach the compiler
                for key in keys:
                    if (recorder := find(key)) is not None:
                        recorder.guard.caught("compiled_backward", error)
        return result

    module.reordering_to_mimic_autograd_engine = reorder_and_mark


def mark_recompute(graph_module: Any) -> None:
    """Put marks around stretches of recomputed nodes in a graph of the backward."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if _is_recomputed(node):
            for part in reversed(_parts(node)):
                node.append(part)
    for stretch in _stretches(graph.nodes):
        _mark_stretch(graph, stretch)
    for node in list(graph.nodes):
        if COUNTS in node.meta and _is_recomputed(node):
            _count_again(graph, node)
    graph_module.recompile()


def _is_recomputed(node: Any) -> bool:
    return node.op == "call_function" and "recompute" in node.meta and CALLS in node.meta


def _is_heavy(node: Any) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return isinstance(op, torch._ops.HigherOrderOperator)
    if torch.Tag.pointwise in op.tags or getattr(op, "is_view", False):
        return False
    return op._schema.name not in _LIGHT


def _stretches(nodes: Iterable[Any]) -> list[list[Any]]:
    """Recomputed nodes with nothing of weight between them, up to the last one that has weight itself."""
    found: list[list[Any]] = []
    current: list[Any] = []
    for node in nodes:
        if _is_recomputed(node):
            current.append(node)
        elif _is_heavy(node) and current:
            found.append(current)
            current = []
    found.append(current)
    for stretch in found:
        while stretch and not _is_heavy(stretch[-1]):
            stretch.pop()
    return [stretch for stretch in found if stretch]


def _mark_stretch(graph: Any, stretch: list[Any]) -> None:
    marks = torch.ops.moetrace
    opened: list[tuple[Call, list[Any]]] = []
    """Calls that have begun, and the nodes in each."""

    def end_last() -> Any:
        (key, site), inside = opened.pop()
        return _insert(graph, marks.recompute_end.default, _results(inside), key, site)

    for node in stretch:
        calls = node.meta[CALLS]
        same = 0
        while same < min(len(calls), len(opened)) and opened[same][0] == calls[same]:
            same += 1
        with graph.inserting_before(node):
            while len(opened) > same:
                end_last()
            for key, site in calls[same:]:
                _insert(graph, marks.recompute_begin.default, [], key, site)
                opened.append(((key, site), []))
        for _, inside in opened:
            inside.append(node)
    last = stretch[-1]
    while last.next.target is operator.getitem and last.next.args[0] is stretch[-1]:
        last = last.next
    while opened:
        with graph.inserting_after(last):
            last = end_last()


def _insert(graph: Any, op: Any, *args: Any) -> Any:
    """A mark where the graph inserts; passes that come later look at what each node gives: nothing."""
    mark = graph.call_function(op, args)
    mark.meta["val"] = None
    return mark


def _parts(node: Any) -> list[Any]:
    return [user for user in node.users if user.target is operator.getitem]


def _results(inside: list[Any]) -> list[Any]:
    """What a mark has to read, so that no pass moves an operation of weight to behind the call's end.

    Those do not move whose results are taken by another one in the call, directly or through cheap ones.
    """
    held: set[Any] = set()
    found = []
    for node in reversed(inside):
        if _is_heavy(node):
            held.add(node)
            for result in _parts(node) or [node]:
                is_tensor = isinstance(result.meta.get("val"), torch.Tensor)
                if is_tensor and held.isdisjoint(result.users):
                    found.append(result)
        elif not held.isdisjoint(node.users):
            held.add(node)
    return found[::-1]


def _count_again(graph: Any, node: Any) -> None:
    before = itertools.takewhile(lambda other: other is not node, graph.nodes)
    by_name = {other.name: other for other in before}
    for name, key, index, further in node.meta[COUNTS]:
        given = [by_name.get(item) if isinstance(item, str) else item for item in further]
        if None in given:
            # No node may read what comes later in its graph.
            logger.info("moetrace: pairs recomputed in a compiled graph are not counted: no %s yet", further)
            continue
        with graph.inserting_after(node):
            _insert(graph, getattr(torch.ops.moetrace, name).default, node, key, index, *given)
