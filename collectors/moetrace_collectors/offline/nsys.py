"""Nsight Systems SQLite exports (`nsys export --type sqlite`) -> RankTrace.

Tables read, as documented by Nsight Systems (exporter schema, "SQLite Schema Reference"):
CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY, _MEMSET, _RUNTIME, NVTX_EVENTS and StringIds. Any of them but the
strings may be missing: an export has only the tables that its recording filled. Times are nanoseconds
from the start of the recording.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from moetrace_collectors.model import IntArray
from moetrace_collectors.offline.rank_trace import (
    NO_CORRELATION,
    AnnotationRows,
    DeviceKind,
    DeviceRows,
    LaunchRows,
    RankTrace,
)
from moetrace_collectors.offline.source import bad_file
from moetrace_collectors.offline.trace_ranks import rank_in_name

FORMAT = "nsys_sqlite"
MAGIC = b"SQLite format 3\x00"
MAX_NS = 2**62

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_MEMCPY, _MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_RUNTIME, _NVTX = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_PUSH_POP, _START_END = 59, 60
"""NVTX_EVENTS.eventType of ranges: NvtxPushPopRange, NvtxStartEndRange."""


def read_nsys(path: Path, *, progress: Callable[[int], None] | None = None) -> RankTrace:
    """The trace in an export; its rank is -1 where the name of the file does not tell.

    Raises:
        UsageError: not such an export, or a broken one.
    """
    try:
        # Read-only and without a lock: an export is a finished file, perhaps on a read-only disk.
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        with closing(connection):
            # The file is somebody else's: its schema may name functions, and none of them is run for it.
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.text_factory = lambda data: data.decode("utf-8", "replace")
            return _read(connection, path)
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        # UnicodeDecodeError: SQLite quotes a damaged name in its message.
        raise bad_file(path, "", f"Nsight Systems SQLite export expected ({error})") from error


def _read(connection: sqlite3.Connection, path: Path) -> RankTrace:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables & {_KERNELS, _NVTX, _RUNTIME}:
        got = ", ".join(sorted(tables)[:5]) or "none"
        raise bad_file(path, "tables", f"{_KERNELS} or {_NVTX} expected, got {got}")
    reader = _Reader(connection, path, tables)
    device = reader.device_rows()
    annotations = reader.annotation_rows()
    launches = reader.launch_rows()
    rank = rank_in_name(path)
    return RankTrace(
        source=str(path),
        format=FORMAT,
        rank=rank,
        rank_told=rank >= 0,
        world_size=None,
        names=tuple(reader.names),
        device=device,
        launches=launches,
        annotations=annotations,
        events=len(device) + len(annotations) + len(launches.correlation),
        left_out=dict(reader.left_out),
    )


class _Reader:
    def __init__(self, connection: sqlite3.Connection, path: Path, tables: set[str]) -> None:
        self._connection, self._path, self._tables = connection, path, tables
        self.names: dict[str, int] = {}
        self.left_out: dict[str, int] = {}
        self._strings: dict[int, str] = {}
        if "StringIds" in tables:
            self._strings = {
                key: str(value) for key, value in connection.execute("SELECT id, value FROM StringIds")
            }

    def device_rows(self) -> DeviceRows:
        rows: list[tuple[Any, ...]] = []
        streams: dict[tuple[Any, Any], int] = {}
        for table, kind, label in (
            (_KERNELS, DeviceKind.KERNEL, ""),
            (_MEMCPY, DeviceKind.MEMCPY, "Memcpy"),
            (_MEMSET, DeviceKind.MEMSET, "Memset"),
        ):
            if table not in self._tables:
                continue
            name = self._pick(table, ("demangledName", "shortName", "mangledName")) if not label else None
            columns = ["start", "end", *self._there(table, ("deviceId", "streamId", "correlationId"))]
            for row in self._select(table, [*columns, *([name] if name else [])]):
                values = dict(zip(columns, row, strict=False))
                begin, stop = values["start"], values["end"]
                if not _is_time(begin) or not _is_time(stop) or stop < begin:
                    self.left_out["no usable time"] = self.left_out.get("no usable time", 0) + 1
                    continue
                stream = (values.get("deviceId"), values.get("streamId"))
                correlation = values.get("correlationId")
                text = label or self._text(row[-1] if name else None)
                rows.append(
                    (
                        begin,
                        stop - begin,
                        self._name(text),
                        streams.setdefault(stream, len(streams)),
                        int(kind),
                        correlation if _is_time(correlation) else NO_CORRELATION,
                    )
                )
        columns_of = _columns(rows, 6)
        return DeviceRows(
            start_ns=columns_of[0],
            duration_ns=columns_of[1],
            name=columns_of[2],
            stream=columns_of[3],
            kind=columns_of[4],
            correlation=columns_of[5],
            detail=np.full(len(rows), -1, dtype=np.int64),
        )

    def launch_rows(self) -> LaunchRows:
        rows: list[tuple[Any, ...]] = []
        if _RUNTIME in self._tables:
            thread = self._there(_RUNTIME, ("globalTid",))
            for row in self._select(_RUNTIME, ["correlationId", "start", *thread]):
                if _is_time(row[0]) and _is_time(row[1]):
                    rows.append((row[0], row[1], row[2] if thread and _is_time(row[2]) else 0))
        rows.sort()
        columns = _columns(rows, 3, ordered=True)
        correlation, index = np.unique(columns[0], return_index=True)
        return LaunchRows(correlation=correlation, start_ns=columns[1][index], thread=columns[2][index])

    def annotation_rows(self) -> AnnotationRows:
        rows: list[tuple[Any, ...]] = []
        if _NVTX in self._tables:
            there = self._there(_NVTX, ("globalTid", "eventType", "text", "textId"))
            for row in self._select(_NVTX, ["start", "end", *there]):
                values = dict(zip(["start", "end", *there], row, strict=True))
                begin, stop = values["start"], values["end"]
                if values.get("eventType", _PUSH_POP) not in (_PUSH_POP, _START_END):
                    continue
                if not _is_time(begin) or not _is_time(stop) or stop < begin:
                    continue  # a range that was still open when the recording ended
                text = values.get("text")
                name = text if isinstance(text, str) and text else self._text(values.get("textId"))
                thread = values.get("globalTid")
                rows.append((begin, stop - begin, self._name(name), thread if _is_time(thread) else 0))
        columns = _columns(rows, 4)
        return AnnotationRows(start_ns=columns[0], duration_ns=columns[1], name=columns[2], thread=columns[3])

    def _select(self, table: str, columns: list[str]) -> Iterator[tuple[Any, ...]]:
        missing = [name for name in columns if name not in self._columns_of(table)]
        if missing:
            raise bad_file(self._path, table, f"column {missing[0]} expected")
        quoted = ", ".join(f'"{name}"' for name in columns)
        yield from self._connection.execute(f'SELECT {quoted} FROM "{table}"')

    def _columns_of(self, table: str) -> set[str]:
        return {row[1] for row in self._connection.execute(f'PRAGMA table_info("{table}")')}

    def _there(self, table: str, names: tuple[str, ...]) -> list[str]:
        have = self._columns_of(table)
        return [name for name in names if name in have]

    def _pick(self, table: str, names: tuple[str, ...]) -> str | None:
        return next(iter(self._there(table, names)), None)

    def _text(self, value: object) -> str:
        if isinstance(value, int):
            return self._strings.get(value, str(value))
        return value if isinstance(value, str) else ""

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))


def _is_time(value: object) -> bool:
    return type(value) is int and -1 < value < MAX_NS


def _columns(rows: list[tuple[Any, ...]], width: int, *, ordered: bool = False) -> list[IntArray]:
    """Rows as columns, in order of the first one."""
    if not rows:
        return [np.zeros(0, dtype=np.int64) for _ in range(width)]
    table: IntArray = np.array(rows, dtype=np.int64)
    if not ordered:
        table = table[np.argsort(table[:, 0], kind="stable")]
    return [np.ascontiguousarray(table[:, index]) for index in range(width)]
