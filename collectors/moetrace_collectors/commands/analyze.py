"""`moetrace analyze`: traces, load dumps, wait matrices and our own files, without a store or a server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from moetrace_collectors.errors import UsageError

if TYPE_CHECKING:
    from moetrace_collectors.offline.analysis import Analysis

HELP = "analyze profiler traces, expert-load dumps, wait matrices and moetrace files"
PROGRESS_BYTES = 8 << 20
"""Files smaller than this altogether are read before a bar could be seen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to read and what to write."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files, or folders of files")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a self-contained HTML page")
    parser.add_argument(
        "--perfetto",
        type=Path,
        metavar="FILE",
        help="also write a trace of all ranks on one clock (.gz: compressed)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, recognise, join, judge, show.

    Raises:
        UsageError: a file cannot be read as what it is, or nowhere to write.
    """
    # Here and not above: a missing extra must not break the other commands.
    from moetrace_collectors.offline.analysis import analyze

    outputs: list[tuple[str, Path]] = []
    for kind, path in (("html", arguments.html), ("perfetto", arguments.perfetto)):
        if path is not None:
            _check_writable(path, f"--{kind}")
            outputs.append((kind, path))
    with ExitStack() as stack:
        analysis = analyze(arguments.paths, progress=_progress(arguments.paths, stack))
    for kind, path in outputs:
        _write(path, f"--{kind}", analysis)
    if arguments.json:
        from moetrace_collectors.offline.result_document import build_result, dump_result

        sys.stdout.write(dump_result(build_result(analysis)) + "\n")
        return 0
    from rich.console import Console

    from moetrace_collectors.offline.result_terminal import print_analysis

    print_analysis(
        analysis,
        console=Console(highlight=False),
        outputs=[(kind, str(path)) for kind, path in outputs],
    )
    return 0


def _write(path: Path, option: str, analysis: Analysis) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        if option == "--html":
            from moetrace_collectors.offline.result_html import render_result

            temporary.write_text(render_result(analysis), encoding="utf-8")
        else:
            from moetrace_collectors.offline.perfetto import write_perfetto
            from moetrace_collectors.traces.trace_events import open_trace

            with open_trace(temporary, named=path) as out:
                write_perfetto(analysis, out)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}; give another file with {option}") from error


def _check_writable(path: Path, option: str) -> None:
    # Before anything is read, which can take a while.
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; give a file with {option}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(
            f"cannot write {path}: {path.parent} is no folder to write in; give another {option}"
        )


def _progress(paths: list[Path], stack: ExitStack) -> Callable[[Path, int], None] | None:
    """A bar on a terminal's standard error, where there is enough to read for one."""
    files = [file for path in paths for file in (path.iterdir() if path.is_dir() else [path])]
    total = sum(file.stat().st_size for file in files if file.is_file())
    if total < PROGRESS_BYTES or not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    bar = stack.enter_context(
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            console=Console(stderr=True),
            transient=True,
        )
    )
    tasks: dict[Path, int] = {}

    def advance(path: Path, size: int) -> None:
        if path not in tasks:
            # What a gzip file holds is known only at its end.
            packed = path.name.endswith(".gz")
            known = None if packed else path.stat().st_size
            tasks[path] = bar.add_task(path.name, total=known)
        bar.update(tasks[path], advance=size)  # type: ignore[arg-type]  # a TaskID is an int

    return advance
