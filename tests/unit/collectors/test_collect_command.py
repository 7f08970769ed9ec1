"""`moetrace collect` ends, whatever its clients and their threads do."""

from __future__ import annotations

import subprocess
import sys

from integration.collector_process import environment

_LEAVE = """
import threading
from concurrent.futures import ThreadPoolExecutor
from moetrace_collectors.commands import collect
collect.IDLE_THREADS_S = 0.2
idle, busy = (ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("moetrace-grpc", "moetrace-otlp"))
idle.submit(int).result()
idle.shutdown(wait=False)
if {is_busy}:
    busy.submit(threading.Event().wait)
collect._leave_busy_threads(7)
print("came back")
"""


def leave(*, is_busy: bool) -> subprocess.CompletedProcess[str]:
    """A process at its end, with a thread that never ends or none."""
    return subprocess.run(
        [sys.executable, "-c", _LEAVE.format(is_busy=is_busy)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_thread_that_never_ends_does_not_keep_the_process() -> None:
    """Python would join it for ever; the process ends with the exit code it has, and says what it cut off."""
    done = leave(is_busy=True)
    assert done.returncode == 7, done.stderr
    assert done.stderr == (
        "moetrace collect: cut off what did not end in time: 1 thread at work for clients or the store\n"
    )
    assert done.stdout == ""


def test_idle_threads_end_by_themselves() -> None:
    """A pool that was shut down leaves nothing to cut off: the process ends as any other."""
    done = leave(is_busy=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "came back\n", "")
