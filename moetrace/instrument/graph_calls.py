"""What inductor makes of marks: plain calls, in the order of the graph.

As ops, marks go through torch's dispatcher into Python, some microseconds; as functions they cost what a
Python call costs. The op stays in the graph until code is written.

Inductor schedules by what is read and written, and a mark writes nothing: work that does not need what a
mark reads would move across it, and marks across each other (seen with torch 2.13, effects or not). So
each mark is a fence: what the graph has before it comes before it in the code, what it has behind it,
behind. Only what is fused into something later moves with that.

Where inductor has no register of such functions, its code calls the op; where it cannot be given an order,
the order is what the marks read.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("moetrace")

_WITHOUT_READS = ("begin", "end", "backward_begin", "backward_end", "recompute_begin", "recompute_end")
WITH_TENSORS = ("count_ids", "count_mask", "count_sizes")
"""Ops that count what a tensor holds."""
_DISPATCHED = ("count_rows", "step_begin", "step_end")
_MODULE = "moetrace.instrument.graph_marks"
_registered = False


def register_with_inductor() -> None:
    """Tell inductor, once it is there: without it nobody asks. Never raises."""
    global _registered
    if _registered or "torch._inductor.compile_fx" not in sys.modules:
        return
    _registered = True
    try:
        from torch._inductor.codegen import custom_extern_kernel_codegen as registry

        for name in (*_WITHOUT_READS, *WITH_TENSORS):
            registry.CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.moetrace.{name}.default"] = (
                registry.CustomCodegen(python=_writer(name, reads=name in WITH_TENSORS))
            )
    except (ImportError, AttributeError, TypeError) as error:
        logger.info("moetrace: marks in compiled graphs go through torch's dispatcher (%s)", error)
    try:
        from torch._inductor.lowering import lowerings

        for name in (*_WITHOUT_READS, *WITH_TENSORS, *_DISPATCHED):
            op = getattr(torch.ops.moetrace, name).default
            lowerings[op] = _fence(op)
    except (ImportError, AttributeError, TypeError) as error:
        logger.info("moetrace: marks in compiled graphs are ordered by what they read (%s)", error)


def _writer(name: str, *, reads: bool) -> Callable[[Any, Callable[[str], None]], None]:
    """Writes one call; without `reads`, the first argument (a list of tensors) is left out."""

    def write(node: Any, write_line: Callable[[str], None]) -> None:
        from torch._inductor.virtualized import V

        arguments = node.codegen_args()
        V.graph.wrapper_code.add_import_once(f"from {_MODULE} import {name} as moetrace_{name}")
        write_line(f"moetrace_{name}({', '.join(arguments if reads else arguments[1:])})")

    return write


_last_marks: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()
"""Of each graph: operations up to and with the last mark, and the name of the mark's buffer."""


def _fence(op: Any) -> Callable[..., Any]:
    """Lowers a mark, and puts it between what was lowered before it and what follows."""

    def lower(*args: Any) -> Any:
        try:
            result = _lowered(op, args)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the compiler
            from torch._inductor.lowering import fallback_handler

            logger.info("moetrace: a mark in a compiled graph is an op like any other (%s)", error)
            as_op: Any = fallback_handler
            return as_op(op, add_to_fallback_set=False)(*args)
        for place in (_give_device, _keep_order):
            try:
                from torch._inductor.virtualized import V

                place(V.graph)
            except Exception as error:  # noqa: BLE001 - nothing of ours may reach the compiler
                logger.info("moetrace: a mark in a compiled graph is ordered by what it reads (%s)", error)
        return result

    return lower


def _lowered(op: Any, args: tuple[Any, ...]) -> Any:
    from torch._inductor import ir

    kernel: Any = ir.FallbackKernel
    return kernel.create(op, *args)


def _give_device(graph: Any) -> None:
    """Put a mark that reads nothing on the device of the work before it.

    Kernels that are written together come out in front of an operation of a device, and not of one without:
    they would run behind the mark, and what they read may have been let go by then.
    """
    *before, mark = graph.operations
    if mark.get_device() is not None:
        return
    devices = map(_device_of, (*reversed(before), *graph.graph_inputs.values()))
    device = next((device for device in devices if device is not None), None)
    if device is not None:
        from torch._inductor import ir

        mark.layout = ir.NoneLayout(device=device)


def _device_of(item: Any) -> Any | None:
    """Device of an operation or of a graph's input; sizes are inputs too, and have none."""
    try:
        return item.get_device()
    except (AttributeError, NotImplementedError):
        return None


def _keep_order(graph: Any) -> None:
    *before, mark = graph.operations
    lowered, last_mark = _last_marks.get(graph, (0, ""))
    comes_after = graph.additional_buffer_deps
    for operation in before[lowered:]:
        if last_mark:
            comes_after[operation.get_operation_name()].add(last_mark)
        for buffer in operation.get_outputs():
            comes_after[mark.get_operation_name()].add(buffer.get_name())
    if last_mark:
        comes_after[mark.get_operation_name()].add(last_mark)
    _last_marks[graph] = (len(graph.operations), mark.get_name())
