"""`moetrace report`: a run's verdicts in the terminal, and its self-contained HTML page."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from moetrace_collectors.commands.store_arguments import add_store_arguments, open_store
from moetrace_collectors.commands.suggestions import worst_steps
from moetrace_collectors.run_directory import RunDirectory, report_name

HELP = "show a run's verdicts and write its HTML report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the run is, which one, and where the page goes."""
    add_store_arguments(parser)
    parser.add_argument(
        "--run", dest="run_id", metavar="RUN_ID", help="which run (default: the one with the newest step)"
    )
    parser.add_argument("--step", type=_step, metavar="N", help="the step to draw (default: the worst)")
    parser.add_argument(
        "-o",
        "--output",
        "--out",
        dest="out",
        type=Path,
        metavar="FILE",
        help="the page (default: report-RUN_ID.html in the run directory; with --url or --dsn in the "
        "current directory)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of the terminal view"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, write, print.

    Raises:
        UsageError: nothing to read, or nowhere to write.
    """
    # Here and not above: a missing extra must not break the other commands.
    from moetrace_collectors.views.report import check_writable, write_report
    from moetrace_collectors.views.store_reader import choose_run

    opened = open_store(arguments)
    directory = opened.directory
    if arguments.out is not None:
        check_writable(arguments.out)
    with opened.store as store:
        run_id = choose_run(store, arguments.run_id)
        out = arguments.out or (
            directory.report_path(run_id) if directory is not None else Path(report_name(run_id))
        )
        report = write_report(store, run_id, out, step=arguments.step)
    address = opened.address
    if arguments.json:
        from moetrace_collectors.views.document import build_document, dump_document

        document = build_document(report.view, report.summary, store=address, report=str(out))
        sys.stdout.write(dump_document(document) + "\n")
        return 0
    from rich.console import Console

    from moetrace_collectors.views.terminal import print_run

    print_run(
        report.view,
        report.summary,
        console=Console(highlight=False),
        store=address,
        report=str(out if directory is not None else out.resolve()),
        commands=_next_commands(arguments, directory, run_id),
    )
    return 0


def _next_commands(arguments: argparse.Namespace, directory: RunDirectory | None, run_id: str) -> list[str]:
    if directory is not None:
        own = run_id == directory.path.resolve().name
        return [worst_steps(f"--dir {shlex.quote(str(directory.path))}", None if own else run_id)]
    option, value = ("--dsn", arguments.dsn) if arguments.dsn is not None else ("--url", arguments.url)
    # A DSN may hold a password, which is not for the screen.
    shown = value if "@" not in value else "..."
    return [worst_steps(f"{option} {shlex.quote(shown)}", run_id)]


def _step(text: str) -> int:
    try:
        step = int(text)
    except ValueError:
        step = -1
    if step < 0:
        raise argparse.ArgumentTypeError(f"a step number from 0 expected, got {text!r}")
    return step
