"""Native blocks for newer protocol versions: the engine's own blocks with what those versions add."""

from __future__ import annotations

import subprocess
import sys

import pytest

from integration.collector_process import environment
from moetrace_collectors.native_blocks import NativeBlockError, with_block_info


def answer(sql: str, form: str = "Native") -> bytes:
    """The engine's answer."""
    code = "import sys, chdb; sys.stdout.buffer.write(chdb.query(*sys.argv[1:]).bytes())"
    done = subprocess.run(
        [sys.executable, "-c", code, sql, form],
        env=environment(),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_one_block_is_what_the_protocol_says() -> None:
    """Info, columns, rows, then name, type, a zero and the values of each column."""
    data = b"\x02\x02\x01a\x05UInt8\x01\x02\x01b\x06String\x01x\x02yz"
    assert with_block_info(data) == (
        b"\x01\x00\x02\xff\xff\xff\xff\x00\x02\x02\x01a\x05UInt8\x00\x01\x02\x01b\x06String\x00\x01x\x02yz"
    )
    assert with_block_info(b"") == b""


COLUMNS = (
    "number AS n",
    "toString(number) AS text",
    "toLowCardinality(toString(number % 300)) AS low",
    "toLowCardinality(if(number % 3, toNullable('x'), NULL)) AS low_maybe",
    "if(number % 2, toNullable(toInt16(number)), NULL) AS maybe",
    "range(number % 4) AS list",
    "arrayMap(x -> toLowCardinality(toString(x)), range(number % 4)) AS lows",
    "map('a', toInt64(number)) AS pairs",
    "CAST(map('a', 1), 'Map(LowCardinality(String), Int64)') AS low_pairs",
    "(number, 'x', [1]) AS both",
    "CAST((number, ['x']), 'Tuple(a UInt64, `b c` Array(String))') AS named",
    "toDateTime64(number, 9, 'UTC') AS time",
    "toFixedString('0123', 4) AS fixed",
    "toDecimal64(number, 2) AS money",
    "toUInt8(number % 2) AS bit",
    "CAST(number % 2, 'Enum8(\\'fo,(r\\' = 0, \\'b\\' = 1)') AS direction",
    "generateUUIDv4() AS id",
    "NULL AS nothing",
    "toFloat32(number) AS real",
)


@pytest.mark.parametrize("rows", [0, 1, 2500])
def test_every_type_keeps_its_values(rows: int) -> None:
    """Cut at each column's name and type, both results are the same but for what the version adds."""
    types = f"DESCRIBE (SELECT {', '.join(COLUMNS)} FROM numbers(1)) SETTINGS print_pretty_type_names = 0"
    described = answer(types, "TabSeparatedRaw").decode()
    kinds = [line.split("\t")[:2] for line in described.splitlines()]
    data = answer(f"SELECT {', '.join(COLUMNS)} FROM numbers({rows}) SETTINGS max_block_size = 1000")
    longer = with_block_info(data)
    info = b"\x01\x00\x02\xff\xff\xff\xff\x00"
    blocks = longer.count(info + bytes([len(COLUMNS)]))
    assert blocks == data.count(b"\x01n\x06UInt64")
    assert len(longer) == len(data) + blocks * (len(info) + len(COLUMNS))
    shorter = longer.replace(info + bytes([len(COLUMNS)]), bytes([len(COLUMNS)]))
    for name, kind in kinds:
        header = bytes([len(name)]) + name.encode() + bytes([len(kind)]) + kind.encode()
        assert data.count(header) == blocks, header
        assert shorter.count(header + b"\x00") >= blocks, header
        before, *after = shorter.split(header)
        shorter = header.join([before, *(part[1:] for part in after)])
    assert shorter == data


def test_a_type_that_is_not_known_is_told_by_name() -> None:
    """One line that says which column, and the way out."""
    data = b"\x01\x01\x01q\x1dAggregateFunction(sum, Int64)\x01"
    with pytest.raises(NativeBlockError, match=r"column q: type AggregateFunction cannot be sent"):
        with_block_info(data)
