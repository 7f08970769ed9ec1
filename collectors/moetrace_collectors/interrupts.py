"""Ctrl-C at moments at which Python's own handling of it would leave something behind, or not come at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held() -> Iterator[None]:
    """A block that an interrupt does not tear apart, as the start of a process: it comes at its end."""
    if _is_deaf():
        yield
        return
    came: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if came and callable(previous):
            previous(came[0], None)


@contextmanager
def deadly() -> Iterator[None]:
    """A block of foreign code that does not return to Python for long: an interrupt ends the process at once.

    Only for reading: nothing of ours runs any more.
    """
    if _is_deaf():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _is_deaf() -> bool:
    """Whether interrupts are none of this thread's business, or are ignored (a shell's background job)."""
    is_main = threading.current_thread() is threading.main_thread()
    return not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN
