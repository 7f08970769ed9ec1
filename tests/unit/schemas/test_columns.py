"""Packed columns: what is packed unpacks to the same, and nothing else unpacks at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrace_schemas import columns
from moetrace_schemas.columns import (
    EXPERTS,
    HEADER,
    LAYOUT_VERSION,
    MAGIC,
    PHASES,
    TRAFFIC,
    ColumnsError,
    Layout,
    pack,
    read_header,
    unpack,
)

RANGES = {
    "h": (-(2**15), 2**15 - 1),
    "H": (0, 2**16 - 1),
    "B": (0, 2**8 - 1),
    "I": (0, 2**32 - 1),
    "q": (-(2**63), 2**63 - 1),
}
ALL = pytest.mark.parametrize("layout", [PHASES, EXPERTS, TRAFFIC], ids=["phases", "experts", "traffic"])


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Layout, list[list[int]], list[int]]:
    """Columns of any layout, with every value that a column can hold."""
    layout = draw(st.sampled_from([PHASES, EXPERTS, TRAFFIC]))
    rows = draw(st.integers(0, 8))
    columns = []
    for column in layout.columns:
        low, high = (0, 5) if column.name == layout.lengths else RANGES[column.typecode]
        columns.append(draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows)))
    names = [column.name for column in layout.columns]
    length = sum(columns[names.index(layout.lengths)]) if layout.lengths else 0
    values = draw(st.lists(st.integers(*RANGES["q"]), min_size=length, max_size=length))
    return layout, columns, values


@given(blocks())
def test_what_is_packed_unpacks_to_the_same(block: tuple[Layout, list[list[int]], list[int]]) -> None:
    """Every value of every column, at the ends of its range too."""
    layout, columns, values = block
    unpacked, ragged = unpack(layout, pack(layout, columns, values))
    assert [list(unpacked[column.name]) for column in layout.columns] == columns
    assert list(ragged) == values


@given(blocks(), st.data())
def test_a_truncated_or_longer_block_never_unpacks(
    block: tuple[Layout, list[list[int]], list[int]], data: st.DataObject
) -> None:
    """A cut anywhere, or a byte too many, is an error and not other numbers."""
    layout, columns, values = block
    packed = pack(layout, columns, values)
    cut = data.draw(st.integers(0, len(packed) - 1))
    for wrong in (packed[:cut], packed + b"\0"):
        with pytest.raises(ColumnsError):
            unpack(layout, wrong)


@given(st.binary(max_size=64), st.sampled_from([PHASES, EXPERTS, TRAFFIC]))
def test_random_bytes_never_do_more_than_raise(data: bytes, layout: Layout) -> None:
    """What is no block is refused with our error, whatever it is."""
    with pytest.raises(ColumnsError):
        unpack(layout, data)


def test_the_layout_on_the_wire_is_exactly_this() -> None:
    """Header, then columns little-endian one after the other, then the values: frozen."""
    packed = pack(EXPERTS, [[-1, 2], [0, 4], [2, 1]], [7, 8, -9])
    assert packed == (
        b"MoeT"
        b"\x01\x00\x02\x00\x02\x00\x00\x00"  # version 1, kind 2, 2 rows
        b"\xff\xff\x02\x00"  # layer
        b"\x00\x04"  # count kind
        b"\x02\x00\x00\x00\x01\x00\x00\x00"  # length
        b"\x07" + bytes(7) + b"\x08" + bytes(7) + b"\xf7" + b"\xff" * 7  # values
    )


def header(**changes: Any) -> bytes:
    """A header of an empty block, with changes."""
    fields = {"magic": MAGIC, "version": LAYOUT_VERSION, "kind": PHASES.kind, "rows": 0, **changes}
    return HEADER.pack(fields["magic"], fields["version"], fields["kind"], fields["rows"])


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"", "block kind 1: 12 header bytes expected, got 0"),
        (b"MoeT" + bytes(7), "block kind 1: 12 header bytes expected, got 11"),
        (header(magic=b"MoeX"), "block kind 1: starts with b'MoeX', expected b'MoeT'"),
        (header(version=2), "block kind 1: layout version 2, this reader knows 1"),
        (header(version=0), "block kind 1: layout version 0, this reader knows 1"),
        (header(kind=2), "block kind 2 where kind 1 was expected"),
        (header(rows=1), "block kind 1: 1 rows need 56 bytes, got 12"),
        (header() + b"\0", "block kind 1: 0 rows need 12 bytes, got 13"),
        (header(rows=2**32 - 1), "block kind 1: 4294967295 rows need"),
    ],
)
def test_a_malformed_header_says_what_is_wrong(block: bytes, message: str) -> None:
    """The message names the block, the place and what was expected."""
    with pytest.raises(ColumnsError, match=message):
        read_header(PHASES, block)


def test_ragged_values_that_do_not_fit_their_lengths_are_refused() -> None:
    """A length column that asks for more, or fewer, values than there are."""
    packed = pack(EXPERTS, [[0], [0], [2]], [1, 2])
    with pytest.raises(ColumnsError, match="block kind 2: 2 values expected after the rows, got 8 bytes"):
        unpack(EXPERTS, packed[:-8])
    with pytest.raises(ColumnsError, match="block kind 2: 2 values expected after the rows, got 24 bytes"):
        unpack(EXPERTS, packed + bytes(8))
    with pytest.raises(ColumnsError, match="block kind 2: 1 rows need at least 19 bytes, got 12"):
        unpack(EXPERTS, packed[:12])


@ALL
def test_columns_of_unequal_length_are_refused_by_the_writer(layout: Layout) -> None:
    """Before anything leaves the process."""
    columns = [[0] for _ in layout.columns]
    columns[-1] = []
    with pytest.raises(ValueError, match=f"{len(layout.columns)} columns of equal length expected"):
        pack(layout, columns)
    with pytest.raises(ValueError, match="columns of equal length expected"):
        pack(layout, columns[:-2])


def test_lengths_that_do_not_add_up_are_refused_by_the_writer() -> None:
    """As many values as the rows announce."""
    with pytest.raises(ValueError, match="block kind 2: lengths add up to 3, got 2 values"):
        pack(EXPERTS, [[0], [0], [3]], [1, 2])


@pytest.mark.parametrize(("position", "value"), [(0, 40_000), (1, 256), (3, -1), (4, 70_000), (7, 2**63)])
def test_a_value_that_its_column_cannot_hold_is_refused_by_the_writer(position: int, value: int) -> None:
    """Never wrapped around into another number."""
    columns = [[0] for _ in PHASES.columns]
    columns[position] = [value]
    with pytest.raises(OverflowError):
        pack(PHASES, columns)


def test_kinds_are_told_apart_by_their_number() -> None:
    """No two layouts share a kind, and names within a layout are unique."""
    layouts = (PHASES, EXPERTS, TRAFFIC)
    assert len({layout.kind for layout in layouts}) == len(layouts)
    for layout in layouts:
        names = [column.name for column in layout.columns]
        assert len(set(names)) == len(names)
        assert layout.lengths is None or layout.lengths in names


def test_every_layout_has_a_kind_of_its_own() -> None:
    """A block that lands in the wrong attribute is refused and not read as something else."""
    layouts = [value for value in vars(columns).values() if isinstance(value, columns.Layout)]
    assert len(layouts) >= 7
    assert len({layout.kind for layout in layouts}) == len(layouts)
