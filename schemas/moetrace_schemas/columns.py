"""Packed columns: how one rank's step rides in a few bytes attributes of one OTLP span.

A block is a 12-byte header and then its columns one after the other, each a contiguous
little-endian array, so a reader maps a column without touching the others:

    magic 4s | version u16 | kind u16 | number of rows u32 | column 0 | column 1 | ... | values

`experts`, `traffic`, `placement`, `waits` are ragged: the row table says how many int64 values belong to each
row, and the values follow all rows. The others have no values.

Standard library only: the writer runs in the model process, where numpy may be absent. The
collector reads the same layout with numpy (moetrace_collectors.decode).
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

MAGIC = b"MoeT"
LAYOUT_VERSION = 1
HEADER = struct.Struct("<4sHHI")


class RowFlag(IntFlag):
    """Bits of a phase row's `flags` column."""

    BARRIER = 1
    """The exchange itself: it ends together on all ranks of the group; its duration is transfer plus wait."""
    RECOMPUTE = 2
    """Activation recompute: a forward that runs again inside backward."""
    CAPTURED = 4
    """Recorded inside a captured device graph."""
    ERROR = 8
    """The model raised inside this interval."""
    ASYNC = 16
    """The exchange returned at launch; the interval runs from launch to the end of the wait."""


_WIDTHS = {"B": 1, "h": 2, "H": 2, "I": 4, "q": 8}


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name and its array typecode (`h` i16, `H` u16, `B` u8, `I` u32, `q` i64)."""

    name: str
    typecode: str

    @property
    def width(self) -> int:
        """Bytes per value on the wire."""
        return _WIDTHS[self.typecode]


@dataclass(frozen=True, slots=True)
class Layout:
    """One kind of block."""

    kind: int
    columns: tuple[Column, ...]
    lengths: str | None = None
    """Name of the column that says how many int64 values belong to a row; None for a flat block."""


PHASES = Layout(
    kind=1,
    columns=(
        Column("layer", "h"),  # MoE layer as the model numbers its blocks; -1 = step level
        Column("phase", "B"),
        Column("direction", "B"),
        Column("microbatch", "H"),
        Column("ordinal", "H"),  # occurrence of (layer, phase, direction, microbatch, barrier?) in the step
        Column("stream", "H"),  # 0 = the compute stream
        Column("flags", "H"),
        Column("start_offset_ns", "q"),  # from the step's start, by the phases' own clock
        Column("duration_ns", "q"),
        Column("bytes", "q"),  # payload this rank sent; -1 = unknown
        Column("rows", "q"),  # rows this rank sent (exchange) or worked on (expert_gemm); -1 = unknown
    ),
)
"""Phase rows, in order of start; rows never overlap on one stream."""

EXPERTS = Layout(
    kind=2,
    columns=(Column("layer", "h"), Column("count_kind", "B"), Column("length", "I")),
    lengths="length",
)
"""Counts per logical expert: `length` values per (layer, count kind)."""

TRAFFIC = Layout(
    kind=3,
    columns=(Column("layer", "h"), Column("phase", "B"), Column("row_bytes", "I"), Column("length", "I")),
    lengths="length",
)
"""Rows sent to each expert-parallel rank: `length` values per (layer, phase); bytes = rows x row_bytes."""

PLACEMENT = Layout(
    kind=4,
    columns=(Column("layer", "h"), Column("length", "I")),
    lengths="length",
)
"""Logical expert in each slot of a layer, slots numbered rank by rank; -1 = empty slot."""


VIOLATIONS = Layout(
    kind=5,
    columns=(Column("layer", "h"), Column("violation", "B"), Column("count", "I")),
)
"""Routing violations of a checked step: one row per (layer, violation)."""

COACTIVATION = Layout(
    kind=6,
    columns=(
        Column("layer", "h"),
        Column("span", "B"),
        Column("first", "H"),
        Column("second", "H"),  # an expert of the same layer (within) or of the next MoE layer (across)
        Column("count", "I"),
    ),
)
"""Tokens that two experts share: one row per pair that occurred."""


WAITS = Layout(
    kind=7,
    columns=(Column("phase", "B"), Column("length", "I")),
    lengths="length",
)
"""What exchange kernels waited for each expert-parallel rank: `length` sums of SM cycles per phase."""


class ColumnsError(ValueError):
    """A packed block does not decode; the message names the block, the place and what was expected."""


def pack(layout: Layout, columns: Sequence[Sequence[int]], values: Sequence[int] = ()) -> bytes:
    """One block. `columns` follow the layout's order, all of one length; `values` are the ragged rest.

    Raises:
        ValueError: columns of unequal length, or lengths that do not add up to the values.
        OverflowError: a value that its column cannot hold.
    """
    rows = len(columns[0])
    if len(columns) != len(layout.columns) or any(len(column) != rows for column in columns):
        raise ValueError(f"block kind {layout.kind}: {len(layout.columns)} columns of equal length expected")
    parts = [HEADER.pack(MAGIC, LAYOUT_VERSION, layout.kind, rows)]
    for spec, column in zip(layout.columns, columns, strict=True):
        parts.append(_little_endian(array(spec.typecode, column)))
        if spec.name == layout.lengths and sum(column) != len(values):
            raise ValueError(
                f"block kind {layout.kind}: lengths add up to {sum(column)}, got {len(values)} values"
            )
    if layout.lengths is not None:
        parts.append(_little_endian(array("q", values)))
    return b"".join(parts)


def unpack(layout: Layout, block: bytes) -> tuple[dict[str, array[int]], array[int]]:
    """Columns by name, and the ragged values (empty for a flat block).

    The reference reader, for tests and for tools without numpy.

    Raises:
        ColumnsError: wrong magic, version or kind, or a length that does not fit.
    """
    rows = read_header(layout, block)
    offset = HEADER.size
    columns: dict[str, array[int]] = {}
    for spec in layout.columns:
        end = offset + rows * spec.width
        columns[spec.name] = _from_little_endian(spec.typecode, block[offset:end])
        offset = end
    values = array("q")
    if layout.lengths is not None:
        expected = sum(columns[layout.lengths])
        if len(block) - offset != expected * 8:
            raise ColumnsError(
                f"block kind {layout.kind}: {expected} values expected after the rows, "
                f"got {len(block) - offset} bytes"
            )
        values = _from_little_endian("q", block[offset:])
    return columns, values


def read_header(layout: Layout, block: bytes) -> int:
    """Number of rows of a block, after checking everything that can be checked without reading columns.

    Raises:
        ColumnsError: as for `unpack`.
    """
    if len(block) < HEADER.size:
        raise ColumnsError(f"block kind {layout.kind}: {HEADER.size} header bytes expected, got {len(block)}")
    magic, version, kind, rows = HEADER.unpack_from(block)
    if magic != MAGIC:
        raise ColumnsError(f"block kind {layout.kind}: starts with {magic!r}, expected {MAGIC!r}")
    if version != LAYOUT_VERSION:
        raise ColumnsError(
            f"block kind {layout.kind}: layout version {version}, this reader knows {LAYOUT_VERSION}"
        )
    if kind != layout.kind:
        raise ColumnsError(f"block kind {kind} where kind {layout.kind} was expected")
    needed = HEADER.size + rows * sum(column.width for column in layout.columns)
    if layout.lengths is None and len(block) != needed:
        raise ColumnsError(f"block kind {kind}: {rows} rows need {needed} bytes, got {len(block)}")
    if len(block) < needed:
        raise ColumnsError(f"block kind {kind}: {rows} rows need at least {needed} bytes, got {len(block)}")
    return int(rows)


def _little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big" and values.itemsize > 1:
        values.byteswap()
    return values.tobytes()


def _from_little_endian(typecode: str, data: bytes) -> array[int]:
    values = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big" and values.itemsize > 1:
        values.byteswap()
    return values
