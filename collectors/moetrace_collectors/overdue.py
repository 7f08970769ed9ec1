"""Calls that are waited for only so long: what does not end in time keeps its place, and holds up nobody.

The embedded engine looks at its limits between blocks of rows, and nothing can end a function in the middle
of one huge array::

    call   --> a place --> a thread of its own: work ............................. ends, place is free
               | none: BusyError   `-- waited for so long --> OverdueError to the caller
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_Result = TypeVar("_Result")

BUSY_WAIT_S = 1.0
"""For a place, seconds."""


class BusyError(Exception):
    """All places are taken."""


class OverdueError(Exception):
    """The call has not ended in time; it goes on."""


class EndingError(Exception):
    """Nothing is begun any more, or waited for."""


class _Call(Generic[_Result]):
    def __init__(self, work: Callable[[], _Result]) -> None:
        self.work = work
        self.returned: tuple[_Result] | None = None
        self.raised: Exception | None = None
        self.is_over = threading.Event()
        """Set when the caller need not wait any more."""


class Places(Generic[_Result]):
    """So many calls at once; thread-safe."""

    def __init__(self, number: int) -> None:
        """Nothing runs yet.

        Args:
            number: calls at once, those that are overdue included.
        """
        self._free = threading.BoundedSemaphore(number)
        self._lock = threading.Lock()
        self._running: set[_Call[_Result]] = set()
        self._is_ending = False

    @property
    def num_running(self) -> int:
        """Calls that have not ended."""
        with self._lock:
            return len(self._running)

    def call(self, work: Callable[[], _Result], *, wait_s: float) -> _Result:
        """What the work returns, or raises.

        Raises:
            BusyError: all places are taken, or this machine has no thread left.
            OverdueError: it has not ended after so long.
            EndingError: `end` was called.
        """
        if not self._free.acquire(timeout=BUSY_WAIT_S):
            raise BusyError
        call = _Call(work)
        with self._lock:
            if self._is_ending:
                self._free.release()
                raise EndingError
            self._running.add(call)
        thread = threading.Thread(target=self._run, args=(call,), name="moetrace-query", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._leave(call)
            raise BusyError from error
        call.is_over.wait(wait_s)
        with self._lock:
            if call in self._running:
                raise EndingError if self._is_ending else OverdueError
        if call.raised is not None:
            raise call.raised
        assert call.returned is not None
        return call.returned[0]

    def end(self, *, wait_s: float) -> None:
        """Begin nothing any more; whoever waits for a call that has not ended after so long is let go."""
        with self._lock:
            self._is_ending = True
            calls = tuple(self._running)
        give_up_s = time.monotonic() + wait_s
        for call in calls:
            call.is_over.wait(max(0.0, give_up_s - time.monotonic()))
            call.is_over.set()

    def _run(self, call: _Call[_Result]) -> None:
        try:
            call.returned = (call.work(),)
        except Exception as error:  # noqa: BLE001 - whoever waits raises it
            call.raised = error
        finally:
            self._leave(call)

    def _leave(self, call: _Call[_Result]) -> None:
        with self._lock:
            self._running.discard(call)
        self._free.release()
        call.is_over.set()
