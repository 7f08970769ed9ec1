"""`moetrace export`: chosen steps of a run as a trace for Perfetto, or as spans for an OTLP backend."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from moetrace_collectors.commands.store_arguments import add_store_arguments, open_store
from moetrace_collectors.errors import UsageError
from moetrace_collectors.number_format import count, duration_text

if TYPE_CHECKING:
    from moetrace_collectors.traces.step_choice import StepChoice
    from moetrace_collectors.traces.step_clocks import RankClock
    from moetrace_collectors.traces.step_records import TracedStep

Item = TypeVar("Item")
HELP = "write steps of a run as a Perfetto trace, or send them as spans to an OTLP backend"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the run is, which steps, and where they go."""
    add_store_arguments(parser)
    parser.add_argument(
        "--run", dest="run_id", metavar="RUN_ID", help="which run (default: the one with the newest step)"
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        default="slow",
        metavar="STEPS",
        help="slow (the 10 costliest), slow:20, all, or numbers and ranges as in 5,7,10-20 (default: slow)",
    )
    parser.add_argument(
        "--perfetto",
        type=Path,
        metavar="FILE",
        help="write a trace that ui.perfetto.dev opens; compressed where the name ends with .gz",
    )
    parser.add_argument(
        "--otlp",
        metavar="URL",
        help="send a trace per step over OTLP/HTTP, as in http://localhost:4318 (headers: "
        "$OTEL_EXPORTER_OTLP_HEADERS)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, align, write and send; 1 where the OTLP backend did not take everything.

    Raises:
        UsageError: nothing to read, or nowhere to write.
    """
    if arguments.perfetto is None and arguments.otlp is None:
        raise UsageError("nowhere to export to: give --perfetto FILE, --otlp URL, or both")
    from moetrace_collectors.traces.otlp_export import endpoint_of
    from moetrace_collectors.traces.step_choice import chosen_steps
    from moetrace_collectors.traces.step_clocks import group_clocks
    from moetrace_collectors.traces.store_steps import read_step
    from moetrace_collectors.views.store_reader import choose_run

    if arguments.perfetto is not None:
        _check_writable(arguments.perfetto)
    if arguments.otlp is not None:
        endpoint_of(arguments.otlp)
    choice: StepChoice = arguments.steps
    with open_store(arguments).store as store:
        run_id = choose_run(store, arguments.run_id)
        numbers = chosen_steps(store, run_id, choice)
        steps = [read_step(store, run_id, step) for step in _shown(numbers, "reading steps")]
    clocks, warnings = group_clocks([step.joined for step in steps])
    for warning in warnings:
        print(f"moetrace: {warning}", file=sys.stderr)
    ranks = {one.rank for step in steps for one in step.joined.rank_steps}
    print(f"run {run_id}: {count(len(steps), 'step')}, {count(len(ranks), 'rank')}{_clock_error(clocks)}")
    if arguments.perfetto is not None:
        _write_perfetto(arguments.perfetto, steps, clocks)
    return 0 if arguments.otlp is None else _send(arguments.otlp, steps, clocks)


def _write_perfetto(path: Path, steps: list[TracedStep], clocks: dict[int, RankClock]) -> None:
    from moetrace_collectors.traces.step_trace import step_events
    from moetrace_collectors.traces.trace_events import open_trace, write_events

    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open_trace(temporary, named=path) as out:
            events = write_events(step_events(steps, clocks), out)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write {path}: {error.strerror}; give another file with --perfetto"
        ) from error
    print(f"{count(events, 'event')} written to {path}: open it at https://ui.perfetto.dev")


def _send(url: str, steps: list[TracedStep], clocks: dict[int, RankClock]) -> int:
    from moetrace_collectors.traces.otlp_export import endpoint_of, make_exporter, send
    from moetrace_collectors.traces.otlp_spans import step_spans

    exporter = make_exporter(url)
    try:
        taken, refused = send(
            exporter,
            (spans for step in _shown(steps, "sending steps") for spans in step_spans(step, clocks)),
        )
    finally:
        exporter.shutdown()
    if refused:
        print(
            f"moetrace: {endpoint_of(url)} does not take spans ({taken:,} taken before): check --otlp, and "
            "that it speaks OTLP over HTTP; sending again is harmless, ids are the same",
            file=sys.stderr,
        )
        return 1
    print(f"{count(taken, 'span')} in {count(len(steps), 'trace')} sent to {endpoint_of(url)}")
    return 0


def _clock_error(clocks: dict[int, RankClock]) -> str:
    aligned = [clock for clock in clocks.values() if clock.fit.pairs]
    if not aligned:
        return ""
    worst = max(clock.fit.error_ns for clock in aligned)
    ranks = count(len(aligned), "rank")
    return f"; clocks of {ranks} aligned to within {duration_text(worst)}, for drawing only"


def _shown(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items, with a bar on a terminal's standard error while there are many."""
    listed = list(items)
    if len(listed) < 4 or not sys.stderr.isatty():
        yield from listed
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(listed, description=what, console=Console(stderr=True), transient=True)


def _check_writable(path: Path) -> None:
    # Before anything is read, which can take a while.
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory; give a file with --perfetto")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(
            f"cannot write {path}: {path.parent} is no directory to write in; give another --perfetto"
        )


def _steps(text: str) -> StepChoice:
    from moetrace_collectors.traces.step_choice import parse_steps

    try:
        return parse_steps(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
