"""Packed columns -> numpy records, with every number checked. Part of the decode stage; pure.

Blocks may start at any offset of a larger buffer, so nothing here assumes alignment: each column is
mapped with `frombuffer` and copied into an aligned int64 array at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moetrace_collectors.model import (
    CoactivationColumns,
    ExpertCounts,
    IntArray,
    PhaseColumns,
    TrafficRow,
    ViolationCount,
    WaitCycles,
)
from moetrace_collectors.phase_shapes import PhaseShapes
from moetrace_schemas.columns import (
    COACTIVATION,
    EXPERTS,
    HEADER,
    PHASES,
    TRAFFIC,
    VIOLATIONS,
    WAITS,
    Column,
    ColumnsError,
    Layout,
    RowFlag,
    read_header,
)
from moetrace_schemas.enums import (
    COACTIVATION_SPAN_BY_CODE,
    COACTIVATION_SPAN_CODE,
    COUNT_KIND_BY_CODE,
    DIRECTION_BY_CODE,
    PHASE_BY_CODE,
    ROUTING_VIOLATION_BY_CODE,
    CoactivationSpan,
    CountKind,
    Phase,
)

MAX_PHASE_ROWS = 200_000
"""Phase rows of one rank step: 1,000 layers x 200 intervals."""
MAX_RAGGED_ROWS = 65_536
"""Rows of the expert or traffic table of one rank step."""
MAX_PAIR_ROWS = 1 << 20
"""Pairs of experts of one rank step: 8 layers of 256 experts, within and across."""
MAX_DURATION_SUM_NS = 2**53
"""Summed durations of one rank step, 104 days. Keeps sums over ranks inside int64 and exact in float64."""
MAX_COUNT = 2**40
"""Pairs, rows or their sum in one ragged row; 65,536 ranks of it still fit in int64."""
MAX_CYCLES = 2**53
"""Summed waits of one rank in one step: a thousand warps for an hour."""
MAX_BYTES = 2**53
"""Payload of one row, bytes."""
MAX_OFFSET_NS = 2**53
STEP_LEVEL = -1
"""`layer` of rows that belong to no MoE layer."""

_DTYPES = {"B": "u1", "h": "<i2", "H": "<u2", "I": "<u4", "q": "<i8"}
_TOTALS = tuple(
    code for code, kind in COUNT_KIND_BY_CODE.items() if kind in (CountKind.INVALID, CountKind.DUMMY)
)
"""Kinds that are one total and no count per expert."""
_FIGURES = (
    ("start_offset_ns", -MAX_OFFSET_NS, MAX_OFFSET_NS, None),
    ("duration_ns", 0, MAX_DURATION_SUM_NS, MAX_DURATION_SUM_NS),
    ("bytes", -1, MAX_BYTES, 2**62),
    ("rows", -1, MAX_COUNT, MAX_BYTES),
)
"""The last columns of phase rows, all of eight bytes: name, lowest, highest, highest sum where they are added
up."""
_SHAPE_WIDTH = sum(column.width for column in PHASES.columns[: -len(_FIGURES)])
"""Bytes of a row in the columns before those."""
_WITHIN_CODE = COACTIVATION_SPAN_CODE[CoactivationSpan.WITHIN]
_EXCHANGES = tuple(code for code, phase in PHASE_BY_CODE.items() if phase in (Phase.DISPATCH, Phase.COMBINE))


def decode_phases(block: bytes, *, microbatch: int = 0, shapes: PhaseShapes | None = None) -> PhaseColumns:
    """Phase rows in order of start.

    Args:
        block: as it came.
        microbatch: of the rank step; rows of a sender that names none in any row are of it, so that the
            rows of two microbatches stay apart in the store.
        shapes: what earlier blocks had in common; None looks at everything anew.

    Raises:
        ColumnsError: the block does not decode, or holds a value out of range.
    """
    num_rows = _num_rows(PHASES, block, MAX_PHASE_ROWS)
    end = HEADER.size + num_rows * _SHAPE_WIDTH
    shape_block = block[HEADER.size : end]
    shape = None if shapes is None else shapes.find(shape_block)
    if shape is None:
        shape = _checked_shape(block, num_rows)
        if shapes is not None:
            shape = shapes.keep(shape_block, shape)
    columns = {**shape, **_checked_figures(block, num_rows, end)}
    if microbatch and not columns["microbatch"].any():
        columns["microbatch"] = np.full(num_rows, microbatch, dtype=np.int64)
    start = columns["start_offset_ns"]
    if num_rows > 1 and bool((start[1:] < start[:-1]).any()):
        # Local work is "what lies before this exchange", so the order carries meaning.
        order = np.argsort(start, kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
    return PhaseColumns(**columns)


def _checked_shape(block: bytes, num_rows: int) -> dict[str, IntArray]:
    """The columns of phase rows that say which row it is."""
    columns = _columns(PHASES.columns[: -len(_FIGURES)], block, num_rows)
    _check_range("layer", columns["layer"], STEP_LEVEL, 2**15 - 1)
    _check_codes("phase", columns["phase"], len(PHASE_BY_CODE))
    _check_codes("direction", columns["direction"], len(DIRECTION_BY_CODE))
    _check_unique(columns)
    return columns


def _checked_figures(block: bytes, num_rows: int, offset: int) -> dict[str, IntArray]:
    """The columns of phase rows that differ from step to step."""
    raw: np.ndarray[Any, Any] = np.frombuffer(
        block, dtype=_DTYPES["q"], count=len(_FIGURES) * num_rows, offset=offset
    )
    figures: IntArray = raw.astype(np.int64).reshape(len(_FIGURES), num_rows)
    if num_rows:
        smallest = np.minimum.reduce(figures, axis=1).tolist()
        largest = np.maximum.reduce(figures, axis=1).tolist()
        for column, least, most, (name, low, high, highest_sum) in zip(
            figures, smallest, largest, _FIGURES, strict=True
        ):
            if least < low or most > high:
                _check_range(name, column, low, high)
            # Nearly always the largest says already that the sum cannot be too much.
            if highest_sum is not None and most * num_rows > highest_sum:
                _check_sum(name, column, highest_sum)
    return {name: column for (name, *_), column in zip(_FIGURES, figures, strict=True)}


def decode_experts(block: bytes) -> tuple[ExpertCounts, ...]:
    """Counts per logical expert, one entry per (layer, kind), summed where a writer split one.

    Raises:
        ColumnsError: the block does not decode, or holds a value out of range.
    """
    columns, rows = _ragged(EXPERTS, block)
    _check_codes("count_kind", columns["count_kind"], len(COUNT_KIND_BY_CODE))
    entries: dict[tuple[int, int], IntArray] = {}
    for layer, kind, counts in zip(
        columns["layer"].tolist(), columns["count_kind"].tolist(), rows, strict=True
    ):
        place = f"counts of layer {layer}, kind {COUNT_KIND_BY_CODE[kind]}"
        if kind in _TOTALS and len(counts) != 1:
            raise ColumnsError(f"{place}: one total expected, got {len(counts)} values")
        _add(entries, (layer, kind), counts, place)
    return tuple(
        ExpertCounts(layer=layer, kind=kind, counts=counts) for (layer, kind), counts in entries.items()
    )


def decode_traffic(block: bytes, *, ep_size: int) -> tuple[TrafficRow, ...]:
    """Rows per destination, one entry per (layer, phase), summed where a writer split one.

    Raises:
        ColumnsError: the block does not decode, or a row does not have `ep_size` values.
    """
    columns, rows = _ragged(TRAFFIC, block)
    _check_codes("phase", columns["phase"], len(PHASE_BY_CODE))
    entries: dict[tuple[int, int], IntArray] = {}
    row_bytes_of: dict[tuple[int, int], int] = {}
    for layer, phase, row_bytes, sent in zip(
        columns["layer"].tolist(),
        columns["phase"].tolist(),
        columns["row_bytes"].tolist(),
        rows,
        strict=True,
    ):
        place = f"traffic of layer {layer}, phase {PHASE_BY_CODE[phase]}"
        if phase not in _EXCHANGES:
            raise ColumnsError(f"{place}: phase dispatch or combine expected")
        if len(sent) != ep_size:
            raise ColumnsError(
                f"{place}: one value per expert-parallel rank ({ep_size}) expected, got {len(sent)}"
            )
        if row_bytes_of.setdefault((layer, phase), row_bytes) != row_bytes:
            raise ColumnsError(f"{place}: given twice with different row_bytes")
        _add(entries, (layer, phase), sent, place)
    for (layer, phase), total in entries.items():
        # Most rows are far below the limit by the largest that any row can hold.
        row_bytes = row_bytes_of[(layer, phase)]
        if row_bytes > MAX_BYTES // MAX_COUNT and int(total.max()) * row_bytes > MAX_BYTES:
            raise ColumnsError(f"traffic of layer {layer}: rows x row_bytes is above {MAX_BYTES}")
    return tuple(
        TrafficRow(layer=layer, phase=phase, row_bytes=row_bytes_of[(layer, phase)], rows=sent)
        for (layer, phase), sent in entries.items()
    )


def decode_violations(block: bytes) -> tuple[ViolationCount, ...]:
    """Violations, one entry per (layer, violation), summed where a writer split one.

    Raises:
        ColumnsError: the block does not decode, or holds a value out of range.
    """
    num_rows = _num_rows(VIOLATIONS, block, MAX_RAGGED_ROWS)
    columns = _columns(VIOLATIONS.columns, block, num_rows)
    _check_range("layer", columns["layer"], STEP_LEVEL, 2**15 - 1)
    _check_codes("violation", columns["violation"], len(ROUTING_VIOLATION_BY_CODE))
    totals: dict[tuple[int, int], int] = {}
    for layer, violation, count in zip(*(columns[c.name].tolist() for c in VIOLATIONS.columns), strict=True):
        totals[(layer, violation)] = totals.get((layer, violation), 0) + count
    return tuple(
        ViolationCount(layer=layer, violation=violation, count=count)
        for (layer, violation), count in totals.items()
    )


def decode_waits(block: bytes, *, ep_size: int) -> tuple[WaitCycles, ...]:
    """Waits of exchange kernels, one entry per phase.

    Raises:
        ColumnsError: the block does not decode, or a row does not have `ep_size` waits of 0 or more.
    """
    columns, rows = _ragged(WAITS, block, MAX_CYCLES)
    _check_codes("phase", columns["phase"], len(PHASE_BY_CODE))
    phases = columns["phase"].tolist()
    if len(set(phases)) != len(phases) or not set(phases).issubset(_EXCHANGES):
        raise ColumnsError("waits: dispatch and combine expected, each once")
    for phase, cycles in zip(phases, rows, strict=True):
        if len(cycles) != ep_size:
            raise ColumnsError(
                f"waits of {PHASE_BY_CODE[phase]}: one value per expert-parallel rank ({ep_size}) expected, "
                f"got {len(cycles)}"
            )
    return tuple(WaitCycles(phase=phase, cycles=cycles) for phase, cycles in zip(phases, rows, strict=True))


def decode_coactivation(block: bytes) -> CoactivationColumns:
    """Pairs of experts, each once.

    Raises:
        ColumnsError: the block does not decode, holds a value out of range, or a pair twice.
    """
    num_rows = _num_rows(COACTIVATION, block, MAX_PAIR_ROWS)
    columns = _columns(COACTIVATION.columns, block, num_rows)
    _check_range("layer", columns["layer"], STEP_LEVEL, 2**15 - 1)
    _check_codes("span", columns["span"], len(COACTIVATION_SPAN_BY_CODE))
    within = columns["span"] == _WITHIN_CODE
    if bool(np.any(columns["first"][within] >= columns["second"][within])):
        raise ColumnsError("column second: within a layer the first expert is the smaller one")
    key = columns["layer"] - STEP_LEVEL
    for name, bits in (("span", 8), ("first", 16), ("second", 16)):
        key = (key << bits) | columns[name]
    if len(np.unique(key)) != num_rows:
        raise ColumnsError("column second: a pair of experts occurs twice; add it up")
    return CoactivationColumns(**columns)


def _num_rows(layout: Layout, block: bytes, limit: int) -> int:
    num_rows = read_header(layout, block)
    if num_rows > limit:
        raise ColumnsError(f"block kind {layout.kind}: {num_rows} rows, at most {limit} are taken")
    return num_rows


def _columns(specs: Sequence[Column], block: bytes, num_rows: int) -> dict[str, IntArray]:
    """The first columns of a block."""
    columns: dict[str, IntArray] = {}
    offset = HEADER.size
    for spec in specs:
        raw: np.ndarray[Any, Any] = np.frombuffer(
            block, dtype=_DTYPES[spec.typecode], count=num_rows, offset=offset
        )
        columns[spec.name] = raw.astype(np.int64)
        offset += num_rows * spec.width
    return columns


def _ragged(
    layout: Layout, block: bytes, highest: int = MAX_COUNT
) -> tuple[dict[str, IntArray], list[IntArray]]:
    num_rows = _num_rows(layout, block, MAX_RAGGED_ROWS)
    columns = _columns(layout.columns, block, num_rows)
    if "layer" in columns:
        _check_range("layer", columns["layer"], STEP_LEVEL, 2**15 - 1)
    lengths = columns["length"].tolist()
    if any(length < 1 for length in lengths):
        raise ColumnsError(f"block kind {layout.kind}: a row without values; leave the row out")
    offset = HEADER.size + num_rows * sum(column.width for column in layout.columns)
    total = sum(lengths)
    if len(block) - offset != total * 8:
        raise ColumnsError(
            f"block kind {layout.kind}: {total} values of 8 bytes expected after the rows, "
            f"got {len(block) - offset} bytes"
        )
    values: IntArray = np.frombuffer(block, dtype="<i8", count=total, offset=offset).astype(np.int64)
    _check_range("values", values, 0, highest)
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    # float64 as in _check_sum, all rows at once.
    if num_rows and float(np.add.reduceat(values, starts, dtype=np.float64).max()) > highest:
        raise ColumnsError(f"column values: values add up to more than {highest}")
    return columns, [values[start:end] for start, end in zip(starts, ends, strict=True)]


def _add(entries: dict[tuple[int, int], IntArray], key: tuple[int, int], row: IntArray, place: str) -> None:
    before = entries.get(key)
    if before is None:
        entries[key] = row
        return
    if len(before) != len(row):
        raise ColumnsError(f"{place}: given twice with {len(before)} and {len(row)} values")
    total = before + row
    _check_sum(place, total, MAX_COUNT)
    entries[key] = total


def _check_range(name: str, column: IntArray, low: int, high: int) -> int:
    """The largest value; 0 of none."""
    if not len(column):
        return 0
    smallest, largest = int(np.minimum.reduce(column)), int(np.maximum.reduce(column))
    if smallest < low or largest > high:
        bad = int(column[(column < low) | (column > high)][0])
        raise ColumnsError(f"column {name}: {bad} is outside {low} to {high}")
    return largest


def _check_codes(name: str, column: IntArray, num_codes: int) -> None:
    # Codes of a closed set are numbered from 0 without gaps (a test holds that).
    if len(column) and int(np.maximum.reduce(column)) >= num_codes:
        raise ColumnsError(f"column {name}: unknown code {int(column.max())}, 0 to {num_codes - 1} are known")


def _check_sum(name: str, column: IntArray, high: int) -> None:
    # float64 on purpose: an int64 sum could wrap around and pass.
    if len(column) and float(np.sum(column, dtype=np.float64)) > high:
        raise ColumnsError(f"column {name}: values add up to more than {high}")


def _check_unique(columns: dict[str, IntArray]) -> None:
    """Two rows of one identity would replace each other in the store: 58 bits of key per row."""
    key = columns["layer"] - STEP_LEVEL
    for name, bits in (("phase", 8), ("direction", 1), ("microbatch", 16), ("ordinal", 16)):
        key = (key << bits) | columns[name]
    key = (key << 1) | (columns["flags"] & int(RowFlag.BARRIER))
    ordered = np.sort(key)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(again):
        twice = int(np.flatnonzero(key == again[0])[1])
        raise ColumnsError(
            f"row {twice}: layer {int(columns['layer'][twice])}, phase "
            f"{PHASE_BY_CODE[int(columns['phase'][twice])]}, ordinal {int(columns['ordinal'][twice])} "
            "occurs twice; count the ordinal up"
        )
