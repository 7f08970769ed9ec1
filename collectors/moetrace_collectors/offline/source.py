"""Opens a file, plain or gzip, and turns every way it can fail into one line that names file and place.

Readers of this package take their bytes from here, so that a truncated archive, a folder in place of a
file or a document nested ten thousand levels deep reads the same in all of them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from moetrace_collectors.errors import UsageError

GZIP_MAGIC = b"\x1f\x8b"
HEAD_BYTES = 64 * 1024
"""What `read_head` shows of a file; enough to recognise every format by."""
MAX_MESSAGE = 2_000
"""Characters of an error's message."""
MAX_DOCUMENT_BYTES = 2 * 1024**3
"""A document that must be held whole in memory may be this large after decompression."""


def bad_file(path: Path, place: str, expected: str) -> UsageError:
    """The error of a file that is not what it should be: file, place, and what was expected there.

    On one line of printable text: what was found there may be quoted in it, and is somebody else's.
    """
    where = f" {place}:" if place else ""
    return UsageError(printable(f"{path}:{where} {expected}"))


def printable(text: str) -> str:
    """The text with control characters and line ends escaped, cut where it is no message any more."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[:MAX_MESSAGE])
    return shown if len(text) <= MAX_MESSAGE else f"{shown} ..."


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed where it is gzip (by its first bytes, not by its name).

    Raises:
        UsageError: it cannot be opened, or what is read from it inside the block is broken gzip.
    """
    try:
        with path.open("rb") as plain:
            compressed = plain.read(2) == GZIP_MAGIC
            plain.seek(0)
            if not compressed:
                yield plain
                return
            with gzip.open(plain, "rb") as stream:
                yield stream  # type: ignore[misc]  # a GzipFile reads bytes like any other binary file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise bad_file(path, "", f"broken gzip, whole file expected ({error})") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def read_head(path: Path) -> bytes:
    """The first bytes, decompressed where it is gzip; fewer where gzip breaks off early.

    Raises:
        UsageError: the file cannot be read.
    """
    with open_bytes(path) as stream:
        return stream.read(HEAD_BYTES)


def read_document(path: Path) -> bytes:
    """The whole file, decompressed.

    Raises:
        UsageError: it cannot be read, or is larger than `MAX_DOCUMENT_BYTES`.
    """
    with open_bytes(path) as stream:
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise bad_file(path, "", f"at most {MAX_DOCUMENT_BYTES} bytes expected for a document of this kind")
    return data


def read_json(path: Path) -> Any:
    """The JSON document in a file.

    Raises:
        UsageError: not JSON, or not to be read.
    """
    return parse_json(read_document(path), path, place="")


def parse_json(text: bytes | str, path: Path, *, place: str) -> Any:
    """One JSON value; `place` names it in the error (empty for the whole file).

    Raises:
        UsageError: not JSON.
    """
    prefix = f"{place}, " if place else ""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{prefix}line {error.lineno} column {error.colno}"
        raise bad_file(path, where, f"JSON expected ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise bad_file(path, f"{prefix}byte {error.start}", "text in UTF-8 expected") from error
    except RecursionError as error:
        raise bad_file(path, place, "JSON nested less deeply expected") from error
    except ValueError as error:  # an integer of thousands of digits
        raise bad_file(path, place, f"JSON with numbers of sane length expected ({error})") from error


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and object of each line that is not blank, one line in memory at a time.

    Raises:
        UsageError: a line is not a JSON object.
    """
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            value = parse_json(line, path, place=f"line {number}")
            if not isinstance(value, dict):
                raise bad_file(path, f"line {number}", "JSON object expected")
            yield number, value
