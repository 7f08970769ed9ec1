"""What torch says of the autograd graph that runs, by names outside of its public interface.

Looked up once. A torch may lack any of them; what stands in for it then says less and raises nothing.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("moetrace")


def _of_torch(name: str, otherwise: Callable[[], Any]) -> Callable[[], Any]:
    try:
        found: Callable[[], Any] = operator.attrgetter(name)(torch)
    except AttributeError:
        return otherwise
    return found


def _first_number() -> int:
    return 0


def _no_node() -> None:
    return None


def _task_by_node() -> int:
    """Whether any backward runs: all of them have one number."""
    return -1 if current_node() is None else 0


next_node: Callable[[], int] = _of_torch("_C._autograd._get_sequence_nr", _first_number)
"""The number that the next autograd node of this thread gets."""
current_node: Callable[[], Any] = _of_torch("_C._current_autograd_node", _no_node)
"""The autograd node that runs on this thread, if any."""
graph_task: Callable[[], int] = _of_torch("_C._current_graph_task_id", _task_by_node)
"""Number of the backward pass that runs on this thread; -1 where none does."""

if graph_task is _task_by_node and current_node is _no_node:
    logger.warning(
        "moetrace: torch %s does not say whether a backward runs: activation recompute is counted as forward",
        torch.__version__,
    )
