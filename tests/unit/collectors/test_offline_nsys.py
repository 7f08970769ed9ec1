"""Nsight Systems SQLite exports: ranges and kernels are recognised as those of a profiler trace are."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from moetrace_collectors.errors import UsageError
from moetrace_collectors.offline.analysis import analyze
from moetrace_collectors.offline.nsys import read_nsys
from moetrace_collectors.offline.phases import recognise
from moetrace_collectors.offline.usage import rank_usage

SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,
    contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER, shortName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER,
    contextId INTEGER, streamId INTEGER, correlationId INTEGER, bytes INTEGER,
    copyKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER, returnValue INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT,
    globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
"""
STRINGS = {
    1: "fused_moe_kernel",
    2: "some_kernel",
    4: "combine",
    5: "void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, int>(float const*)",
}


def export(path: Path, *, without: str = "") -> Path:
    """A small export.

    ::

        thread 7     |-- NVTX combine 100-200 --|      launches of correlation 1..4 at 10, 20, 150, 300
        device       router 1000-1010  experts 1010-1110  some_kernel 1110-1130  copy 1140-1150
    """
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO StringIds VALUES (?, ?)", STRINGS.items())
        connection.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, 0, ?, ?)",
            [(1000, 1010, 1, 5, 5), (1010, 1110, 2, 1, 1), (1110, 1130, 3, 2, 2)],
        )
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1140, 1150, 0, 1, 7, 4, 64, 1)")
        connection.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, 77, ?, 2, 0)",
            [(10, 11, 1), (20, 21, 2), (150, 151, 3), (300, 301, 4)],
        )
        connection.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, 77, NULL, ?, 0)",
            [(100, 200, 59, None, 4), (100, None, 59, "open", None), (0, 500, 75, "domain", None)],
        )
        if without:
            connection.execute(f"DROP TABLE {without}")
        connection.commit()
    return path


def test_ranges_and_kernels_become_phases(tmp_path: Path) -> None:
    """The range holds the launch of the kernel without a known name; the others are known by name."""
    trace = read_nsys(export(tmp_path / "rank3.sqlite"))
    usage = rank_usage(trace, recognise(trace))
    assert trace.rank == 3
    assert {name: time.duration_ns for name, time in usage.phases.items()} == {
        "router": 10, "expert_gemm": 100, "combine": 20, "memcpy": 10}  # fmt: skip
    assert (usage.busy_ns, usage.idle_ns) == (140, 10)


@pytest.mark.parametrize(
    "table", ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_MEMCPY"]
)
def test_tables_that_were_not_recorded_may_be_missing(tmp_path: Path, table: str) -> None:
    """Kernels are still known by name."""
    trace = read_nsys(export(tmp_path / "a.sqlite", without=table))
    assert rank_usage(trace, recognise(trace)).phases["expert_gemm"].duration_ns == 100


def test_analyze_recognises_the_file(tmp_path: Path) -> None:
    """By its content; the name does not matter."""
    analysis = analyze([export(tmp_path / "recording")])
    assert [file.format for file in analysis.files] == ["nsys_sqlite"]
    assert analysis.usage[0].moe_layers == 1


def test_other_databases_and_broken_ones_are_one_line(tmp_path: Path) -> None:
    """No traceback from SQLite."""
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.commit()
    with pytest.raises(UsageError, match="CUPTI_ACTIVITY_KIND_KERNEL or NVTX_EVENTS expected, got t"):
        read_nsys(other)
    whole = export(tmp_path / "whole.sqlite").read_bytes()
    for size in (20, 100, 4096, len(whole) - 4096):
        (tmp_path / "cut.sqlite").write_bytes(whole[:size])
        with pytest.raises(UsageError, match="Nsight Systems SQLite export expected"):
            read_nsys(tmp_path / "cut.sqlite")
