"""One run from its store to what a command shows: read, summarise, write the page. Only this view writes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moetrace_collectors.errors import UsageError
from moetrace_collectors.views.findings import Summary
from moetrace_collectors.views.report_html import render_report
from moetrace_collectors.views.run_records import RunView
from moetrace_collectors.views.store_reader import read_run
from moetrace_collectors.views.store_rows import Store
from moetrace_collectors.views.summarise import summarise


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run as read, what it says, and where its page lies."""

    view: RunView
    summary: Summary
    path: Path


def write_report(store: Store, run_id: str, out: Path, *, step: int | None = None) -> RunReport:
    """Read a run and write its HTML report.

    Args:
        store: Where the rows are.
        run_id: Which run.
        out: The file to write; replaced in one step, so that a reader never sees half a page.
        step: The step to draw; None for the worst.

    Raises:
        UsageError: no such step, nothing joined yet, or the file cannot be written.
    """
    check_writable(out)
    view = read_run(store, run_id, step=step)
    summary = summarise(view.steps)
    _write(out, render_report(view, summary))
    return RunReport(view=view, summary=summary, path=out)


def check_writable(out: Path) -> None:
    """Refuse what cannot be written.

    Raises:
        UsageError: `out` is a directory, or its directory is missing or not writable.
    """
    # Before the store is read, which can take a while.
    if out.is_dir():
        raise UsageError(f"cannot write {out}: it is a directory; give a file with --out")
    if not out.parent.is_dir():
        raise UsageError(
            f"cannot write {out}: {out.parent} is not a directory; create it or give another --out"
        )
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"cannot write {out}: {out.parent} is not writable; give another file with --out")


def _write(out: Path, text: str) -> None:
    temporary = out.with_name(f".{out.name}.{os.getpid()}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"cannot write {out}: {error.strerror}; give another file with --out") from error
