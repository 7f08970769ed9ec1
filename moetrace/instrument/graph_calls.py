"""Lets code that inductor writes call marks as plain functions.

As ops they go through torch's dispatcher into Python, some microseconds; as functions they cost what a
Python call costs. The op stays in the graph until code is written, so its place there is the same.
Where inductor has no register of such functions, its code calls the op.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("moetrace")

_WITHOUT_READS = ("begin", "end", "backward_begin", "backward_end")
_WITH_TENSORS = ("count_ids", "count_mask", "count_sizes")
_MODULE = "moetrace.instrument.graph_marks"
_registered = False


def call_directly() -> None:
    """Register with inductor, once it is there: without it nobody asks. Never raises."""
    global _registered
    if _registered or "torch._inductor.compile_fx" not in sys.modules:
        return
    _registered = True
    try:
        from torch._inductor.codegen import custom_extern_kernel_codegen as registry

        for name in (*_WITHOUT_READS, *_WITH_TENSORS):
            registry.CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.moetrace.{name}.default"] = (
                registry.CustomCodegen(python=_writer(name, reads=name in _WITH_TENSORS))
            )
    except (ImportError, AttributeError, TypeError) as error:
        logger.info("moetrace: marks in compiled graphs go through torch's dispatcher (%s)", error)


def _writer(name: str, *, reads: bool) -> Callable[[Any, Callable[[str], None]], None]:
    """Writes one call; without `reads`, the first argument (a list of tensors) is left out."""

    def write(node: Any, write_line: Callable[[str], None]) -> None:
        from torch._inductor.virtualized import V

        arguments = node.codegen_args()
        V.graph.wrapper_code.add_import_once(f"from {_MODULE} import {name} as moetrace_{name}")
        write_line(f"moetrace_{name}({', '.join(arguments if reads else arguments[1:])})")

    return write
