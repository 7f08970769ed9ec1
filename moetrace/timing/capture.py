"""Keeps device queries and graph captures apart.

While a CUDA graph is captured, no thread of the process may ask an event or wait for one: the capture
would fail. So whoever resolves events does it through the gate, and a capture closes it. Only a capture
ever waits here, for the microseconds of a query; the model's hot path does not come by.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class CaptureGate:
    """Open while no graph is captured."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captures = 0

    def close(self) -> None:
        """A capture begins; returns once nobody is asking."""
        with self._lock:
            self._captures += 1

    def open(self) -> None:
        """A capture has ended."""
        with self._lock:
            self._captures -= 1

    def run(self, ask: Callable[[], T]) -> T | None:
        """What `ask` returns; None, without asking, while a graph is captured."""
        with self._lock:
            return ask() if self._captures == 0 else None
