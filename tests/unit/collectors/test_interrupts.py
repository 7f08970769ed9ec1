"""Ctrl-C where Python's own handling would tear something apart, or not come at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from moetrace_collectors import interrupts


def test_an_interrupt_waits_for_the_end_of_a_held_block() -> None:
    """What the block makes is whole, and the interrupt is not lost."""
    made: list[str] = []

    def start() -> None:
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGINT)
            made.append("process")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert made == ["process"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_ends_the_process_in_a_deadly_block() -> None:
    """Foreign code that never comes back to Python does not keep the process; outside nothing has changed."""
    with interrupts.deadly():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    code = (
        "import os, signal\n"
        "from moetrace_collectors import interrupts\n"
        "with interrupts.deadly():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "print('still here')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")


def test_who_ignores_interrupts_goes_on_ignoring_them() -> None:
    """A job in the background of a shell is not to be killed by a Ctrl-C meant for another."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.deadly(), interrupts.held():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
