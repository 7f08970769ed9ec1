"""`moetrace top`: the newest steps of a run, live: which rank, layer and phase costs what, right now."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from moetrace_collectors.commands.store_arguments import add_store_arguments, open_store
from moetrace_collectors.errors import UsageError

if TYPE_CHECKING:
    from moetrace_collectors.views.recent_records import CollectorCounters
    from moetrace_collectors.views.store_rows import ClientStore, HttpStore
    from moetrace_collectors.views.top_screen import Frame

HELP = "watch a run live: who extends its newest steps, by how much, and how even the experts are"
LEAST_INTERVAL_S = 0.1
MOST_STEPS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the run is, which one, how much of it and how often."""
    add_store_arguments(parser)
    parser.add_argument(
        "--run",
        dest="run_id",
        metavar="RUN_ID",
        help="which run (default: always the one with the newest step)",
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        default=50,
        metavar="N",
        help="how many of the newest joined steps (default: %(default)s)",
    )
    parser.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="S",
        help="seconds between refreshes (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end, as for scripts")


def run(arguments: argparse.Namespace) -> int:
    """Show frames until the user quits; lines of new steps where the output is no terminal.

    Raises:
        UsageError: nothing to read.
    """
    from rich.console import Console

    from moetrace_collectors.commands.top_live import follow, watch
    from moetrace_collectors.views.top_screen import render

    console = Console(highlight=False)
    opened = open_store(arguments)
    with opened.store as store:
        source = FrameSource(store, arguments.run_id, steps=arguments.steps)
        first = source.read()
        if arguments.once or not source.is_live:
            console.print(render(first, console))
            if not arguments.once:
                print("no collector runs there, so there is nothing to wait for", file=sys.stderr)
        elif not console.is_terminal or console.is_dumb_terminal:
            follow(source.read_or_complain, first, interval_s=arguments.interval)
        else:
            watch(source.read_or_complain, first, console, interval_s=arguments.interval)
    return 0


class FrameSource:
    """Reads frames of one store; remembers what a rate and a complaint need."""

    def __init__(
        self,
        store: ClientStore | HttpStore,
        run_id: str | None,
        *,
        steps: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        from moetrace_collectors.views.store_rows import HttpStore

        self._store = store
        self._run_id = run_id
        self._steps = steps
        self._clock_s = clock_s
        self._collector = store.address if isinstance(store, HttpStore) else ""
        self.is_live = isinstance(store, HttpStore) or not store.is_embedded
        """Whether anything new can come: nobody writes to an embedded store that is open here."""
        self._counters: CollectorCounters | None = None
        self._frame: Frame | None = None

    def read(self) -> Frame:
        """A frame as of now.

        Raises:
            UsageError: the store does not answer or does not hold the run.
        """
        from moetrace_collectors.views.recent_reader import read_recent
        from moetrace_collectors.views.top_screen import Frame

        try:
            recent = read_recent(self._store, self._run_id, limit=self._steps)
        except UsageError as error:
            # A collector that has just started has tables soon; a named run that is missing is a mistake.
            if self._run_id is not None or "nothing has been stored there yet" not in str(error):
                raise
            recent = None
        health, troubled = self._health()
        self._frame = Frame(run=recent, source=self._store.address, health=health, troubled=troubled)
        return self._frame

    def read_or_complain(self) -> Frame:
        """A frame as of now, or the one before with the reason why there is no newer one."""
        from moetrace_collectors.views.top_screen import Frame

        try:
            return self.read()
        except UsageError as error:
            before = self._frame or Frame(run=None, source=self._store.address, health="", troubled=True)
            return replace(before, health=f"{error}; trying again", troubled=True)

    def _health(self) -> tuple[str, bool]:
        from moetrace_collectors.views.collector_counters import health_line, is_troubled, read_counters

        if not self._collector:
            return "read from its store, no collector was asked", False
        try:
            now = read_counters(self._collector, clock_s=self._clock_s)
        except UsageError as error:
            return str(error), True
        before, self._counters = self._counters, now
        return health_line(now, before), is_troubled(now, before)


def _steps(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= MOST_STEPS:
        raise argparse.ArgumentTypeError(f"a number from 1 to {MOST_STEPS} expected, got {text!r}")
    return value


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_INTERVAL_S <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{LEAST_INTERVAL_S} to 3600 seconds expected, got {text!r}")
    return value
