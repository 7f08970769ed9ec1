"""The loops behind `moetrace top`: a screen that is redrawn, or lines where there is no screen.

Frames are read in a thread of their own, so that a slow store never holds up a key or a resize.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live

from moetrace_collectors.number_format import plain
from moetrace_collectors.views.top_screen import KEYS, Frame, render, step_line

QUIT_KEYS = frozenset("qQ\x1b\x04")
"""Also Escape and Ctrl-D."""
_SIGNAL = b"s"
_STOP = b"x"


class _Reader:
    """Reads frames at an even pace in a thread; `wake` is told of each."""

    def __init__(
        self, read: Callable[[], Frame], first: Frame, wake: Callable[[], None], interval_s: float
    ) -> None:
        self._read = read
        self._wake = wake
        self._interval_s = interval_s
        self._stop = threading.Event()
        self.frame = first
        self._thread = threading.Thread(target=self._run, name="moetrace-top", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.frame = self._read()
            self._wake()

    def stop(self) -> None:
        """Ask for no more frames; a read that hangs is left to its own timeout."""
        self._stop.set()


def watch(read: Callable[[], Frame], first: Frame, console: Console, *, interval_s: float) -> None:
    """Redraw the screen with each frame and each resize until q, Ctrl-C or SIGTERM; leaves it as it was.

    Args:
        read: Makes a frame; never raises UsageError.
        first: What to show at once.
        console: A terminal.
        interval_s: Between reads.
    """
    with _wakeups() as (awaited, wake), _single_keys() as keyboard:
        reader = _Reader(read, first, lambda: wake(_SIGNAL), interval_s)
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(render(reader.frame, console, height=console.height, keys=KEYS), refresh=True)
                    if _quits(awaited, keyboard):
                        return
        except KeyboardInterrupt:
            return
        finally:
            reader.stop()


def follow(read: Callable[[], Frame], first: Frame, *, interval_s: float) -> None:
    """Print a line per newly joined step, and on stderr what is wrong, until Ctrl-C."""
    seen: set[tuple[str, int]] = set()
    run_id, complaint = "", ""
    pause = threading.Event()
    frame = first
    try:
        while True:
            if frame.run is not None:
                if frame.run.run_id != run_id:
                    run_id = frame.run.run_id
                    print(f"run {plain(run_id)}", flush=True)
                window = {(run_id, row.step) for row in frame.run.steps}
                for row in frame.run.steps:
                    if (run_id, row.step) not in seen:
                        print(step_line(row), flush=True)
                seen = window
            told = frame.health if frame.troubled else ""
            if told and told != complaint:
                print(f"collector: {plain(told)}", file=sys.stderr, flush=True)
            complaint = told
            pause.wait(interval_s)
            frame = read()
    except KeyboardInterrupt:
        return


def _quits(awaited: int, keyboard: int | None) -> bool:
    """Wait for a key, a frame, a resize or a signal; whether it says to quit."""
    sources = [awaited] if keyboard is None else [awaited, keyboard]
    ready, _, _ = select.select(sources, [], [])
    if awaited in ready and _STOP in os.read(awaited, 4096):
        return True
    if keyboard is not None and keyboard in ready:
        typed = os.read(keyboard, 64)
        # Nothing to read: the terminal has gone. Arrow keys begin with Escape and quit nothing.
        return not typed or (len(typed) == 1 and chr(typed[0]) in QUIT_KEYS)
    return False


@contextmanager
def _wakeups() -> Iterator[tuple[int, Callable[[bytes], None]]]:
    """A pipe that frames, resizes and SIGTERM write to, and what writes to it."""
    awaited, written = os.pipe()
    os.set_blocking(written, False)
    closed = threading.Event()

    def wake(reason: bytes) -> None:
        if closed.is_set():
            return
        try:
            os.write(written, reason)
        except OSError:
            pass  # full: whoever reads is woken anyway; or closed just now

    def on_signal(number: int, _: FrameType | None) -> None:
        wake(_STOP if number == signal.SIGTERM else _SIGNAL)

    before: dict[int, Any] = {
        number: signal.signal(number, on_signal) for number in (signal.SIGWINCH, signal.SIGTERM)
    }
    try:
        yield awaited, wake
    finally:
        closed.set()
        for number, handler in before.items():
            signal.signal(number, handler)
        # The reading end stays for a reader thread that is in the middle of a wake.
        os.close(awaited)


@contextmanager
def _single_keys() -> Iterator[int | None]:
    """Standard input key by key and without echo; None where it is no terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
