"""What a file is, told by its content, and the files that a path stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from moetrace_collectors.errors import UsageError
from moetrace_collectors.offline import nsys
from moetrace_collectors.offline.load_dumps import PARQUET_MAGIC, ZIP_MAGIC
from moetrace_collectors.offline.load_routes import looks_like_routes
from moetrace_collectors.offline.load_tables import has_columns
from moetrace_collectors.offline.own_steps import first_object, looks_like_otlp, looks_like_own
from moetrace_collectors.offline.source import bad_file, read_head
from moetrace_collectors.run_directory import STORE_NAME, listed, runs_below

KNOWN = (
    "a PyTorch profiler trace, an expert-load dump (JSON, JSON lines, CSV, NPZ, Parquet), a wait matrix, "
    "an Nsight Systems SQLite export, or moetrace's own JSON lines"
)
SUFFIXES = (
    ".json",
    ".json.gz",
    ".jsonl",
    ".jsonl.gz",
    ".csv",
    ".csv.gz",
    ".npz",
    ".parquet",
    ".sqlite",
    ".db",
)
"""Files of a folder that are looked at; a file that is named itself may have any name."""
MAX_FILES = 16_384
_PART = re.compile(r"([^0-9]*)([0-9]*)")
_TRACE_MARKS = (b'"traceEvents"', b'"deviceProperties"', b'"distributedInfo"', b'"traceName"')
"""Of these a PyTorch profiler trace has one in its first 64 KiB, however much stands before its events."""


class InputKind(StrEnum):
    """Which reader a file goes to."""

    TRACE = "trace"
    NSYS = "nsys"
    ROUTES = "routes"
    TABLE = "table"
    """CSV or Parquet."""
    ARCHIVE = "archive"
    """NPZ: counts or a wait matrix."""
    OWN = "own"
    OTLP = "otlp"
    OTLP_LINES = "otlp_lines"
    DOCUMENT = "document"
    """JSON of counts or matrices; which one is told by the parsed document."""


def kind_of(path: Path) -> InputKind:
    """The kind of a file.

    Raises:
        UsageError: it cannot be read, is empty, or is none of the known kinds.
    """
    head = read_head(path)
    if head.startswith(nsys.MAGIC):
        return InputKind.NSYS
    if head.startswith(ZIP_MAGIC):
        return InputKind.ARCHIVE
    if head.startswith(PARQUET_MAGIC):
        return InputKind.TABLE
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        raise bad_file(path, "", f"empty; expected is {KNOWN}")
    if b"\x00" in head:
        raise bad_file(path, "byte 0", f"binary of no known kind; expected is {KNOWN}")
    if text[:1] not in (b"{", b"["):
        first_line = text.split(b"\n", 1)[0]
        if b"," in first_line and has_columns(first_line.decode("utf-8", "replace").strip()):
            return InputKind.TABLE
        raise bad_file(path, "line 1", f"text of no known kind; expected is {KNOWN}")
    first = first_object(path)
    if first is not None:
        if looks_like_own(first):
            return InputKind.OWN
        if looks_like_routes(first):
            return InputKind.ROUTES
        if looks_like_otlp(first):
            return InputKind.OTLP_LINES
    if b'"resourceSpans"' in text[:4096] and b'"traceEvents"' not in text:
        return InputKind.OTLP
    if text[:1] == b"[":
        # A bare array of events, or a bare matrix: the first element tells.
        return InputKind.TRACE if text[1:].lstrip()[:1] in (b"{", b"]", b"") else InputKind.DOCUMENT
    return InputKind.TRACE if any(mark in head for mark in _TRACE_MARKS) else InputKind.DOCUMENT


def expand(paths: Sequence[Path]) -> tuple[list[Path], bool]:
    """The files that the paths stand for, and whether some were found in folders.

    Named files stay in the order in which they were named; those of a folder come as people count, since the
    place of a trace may be all that tells its rank: `trace_2.json` before `trace_10.json`.

    Raises:
        UsageError: no such path, or a folder without a file of a known name.
    """
    files: list[Path] = []
    searched = False
    for path in paths:
        if path.is_dir():
            if (path / STORE_NAME).is_dir():
                raise UsageError(f"{path} is a run directory: moetrace report --dir {path} shows it")
            searched = True
            found = _fitting(path)
            if not found:
                raise UsageError(f"{path}: {_nothing_in(path)}")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise UsageError(f"{path}: no such file or folder")
    unique = list(dict.fromkeys(files))
    if len(unique) > MAX_FILES:
        raise UsageError(f"at most {MAX_FILES} files expected, got {len(unique)}")
    return unique, searched


def _fitting(folder: Path) -> list[Path]:
    """Files of a known name directly in a folder.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}") from error
    return sorted(
        (
            file
            for file in entries
            if file.is_file() and file.name.endswith(SUFFIXES) and not file.name.startswith(".")
        ),
        key=_as_people_count,
    )


def _as_people_count(path: Path) -> tuple[list[tuple[str, int]], str]:
    """Numbers in a name by their value; the name itself tells 2 from 02."""
    parts = [(text, int(digits or -1)) for text, digits in _PART.findall(path.name)]
    return parts, path.name


def _nothing_in(folder: Path) -> str:
    """Why a folder without a file of a known name gives nothing, and what lies one level below it."""
    said = "no file directly in it that can be read (folders below it are not looked into)"
    runs = runs_below(folder)
    if runs:
        return f"{said}; run directories in it: {listed(runs)}: moetrace report --dir {runs[-1]} shows one"
    below = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=_as_people_count)
    holding = [entry for entry in below if _holds_files(entry)]
    if holding:
        return f"{said}; folders with such files: {listed(holding)}: moetrace analyze {holding[0]} reads one"
    return f"{said}; names end in {', '.join(SUFFIXES)}"


def _holds_files(folder: Path) -> bool:
    try:
        return bool(_fitting(folder))
    except UsageError:
        return False
