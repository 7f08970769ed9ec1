"""`moetrace report`: a run's verdicts in the terminal, and its self-contained HTML page."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from moetrace_collectors.run_directory import RunDirectory, newest_run_directory, open_run_directory

HELP = "show a run's verdicts and write its HTML report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the run is, which one, and where the page goes."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--dir", type=Path, metavar="DIR", help="run directory (default: the newest of moetrace-runs/)"
    )
    source.add_argument(
        "--dsn", metavar="DSN", help="a store: chdb:///path, clickhouse://host or https://host"
    )
    source.add_argument("--url", metavar="URL", help="a running collector, as in http://127.0.0.1:4318")
    parser.add_argument(
        "--database", default="moetrace", help="database of the tables (default: %(default)s)"
    )
    parser.add_argument(
        "--run", dest="run_id", metavar="RUN_ID", help="which run (default: the one with the newest step)"
    )
    parser.add_argument("--step", type=_step, metavar="N", help="the step to draw (default: the worst)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in the run directory, or here)",
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
    from moetrace_collectors.views.report import write_report
    from moetrace_collectors.views.store_rows import ClientStore, HttpStore, store_of_directory, store_of_dsn

    directory: RunDirectory | None = None
    if arguments.dsn is not None:
        store: ClientStore | HttpStore = store_of_dsn(arguments.dsn, database=arguments.database)
    elif arguments.url is not None:
        store = HttpStore(arguments.url, database=arguments.database)
    else:
        directory = open_run_directory(arguments.dir) if arguments.dir is not None else newest_run_directory()
        store = store_of_directory(directory, database=arguments.database)
    out = arguments.out or (directory.report_path if directory is not None else Path("report.html"))
    with store:
        report = write_report(store, arguments.run_id, out, step=arguments.step)
    address = str(directory.store_path) if directory is not None else store.address
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
        report=str(out),
        commands=_next_commands(directory),
    )
    return 0


def _next_commands(directory: RunDirectory | None) -> list[str]:
    if directory is None:
        return []
    query = "SELECT step, rank, phase, worth_ns FROM step_verdicts ORDER BY worth_ns DESC LIMIT 10"
    return [f'moetrace query --dir {shlex.quote(str(directory.path))} "{query}"']


def _step(text: str) -> int:
    try:
        step = int(text)
    except ValueError:
        step = -1
    if step < 0:
        raise argparse.ArgumentTypeError(f"a step number from 0 expected, got {text!r}")
    return step
