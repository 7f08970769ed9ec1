"""Rank steps -> the large tables as Arrow columns. Pure; part of the ClickHouse sink.

Each column is put together by numpy from the arrays that came off the wire, and texts go as dictionaries:
a thousand rows cost what one costs as Python objects. Column names are those of the migrations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from moetrace_collectors.model import ExpertCounts, IntArray, RankStep
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import (
    COACTIVATION_SPAN_BY_CODE,
    COUNT_KIND_BY_CODE,
    DIRECTION_BY_CODE,
    PHASE_BY_CODE,
    CountKind,
)

NS_PER_MS = 1_000_000
_PHASES = [PHASE_BY_CODE[code].value for code in range(len(PHASE_BY_CODE))]
_DIRECTIONS = [DIRECTION_BY_CODE[code].value for code in range(len(DIRECTION_BY_CODE))]
_SPANS = [COACTIVATION_SPAN_BY_CODE[code].value for code in range(len(COACTIVATION_SPAN_BY_CODE))]
_COUNT_KINDS = [COUNT_KIND_BY_CODE[code].value for code in range(len(COUNT_KIND_BY_CODE))]
_ROUTED = next(code for code, kind in COUNT_KIND_BY_CODE.items() if kind is CountKind.ROUTED)
_RECEIVED = next(code for code, kind in COUNT_KIND_BY_CODE.items() if kind is CountKind.RECEIVED)
_MAX_INT8_TEXTS = 127
_NS = pa.timestamp("ns", tz="UTC")
_MS = pa.timestamp("ms", tz="UTC")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumns:
    """Rows of one table as an Arrow table."""

    table: str
    arrow: Any

    def __len__(self) -> int:
        return int(self.arrow.num_rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Column names."""
        return tuple(self.arrow.column_names)


class _Repeated:
    """Columns that are the same in every row of one entry (a rank step, or a layer of one)."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = np.asarray(counts, dtype=np.int64)

    def numbers(self, values: Sequence[int], dtype: type[Any]) -> Any:
        return np.repeat(np.asarray(values, dtype=np.int64).astype(dtype), self._counts)

    def texts(self, values: Sequence[str]) -> Any:
        numbers: dict[str, int] = {}
        codes = [numbers.setdefault(value, len(numbers)) for value in values]
        return _texts(
            np.repeat(np.asarray(codes, dtype=_code_type(len(numbers))), self._counts), list(numbers)
        )


def _code_type(num_texts: int) -> type[Any]:
    """The narrowest type that numbers so many texts: five text columns a row, which the engine reads."""
    return np.int8 if num_texts <= _MAX_INT8_TEXTS else np.int32


def _texts(codes: Any, texts: list[str]) -> Any:
    return pa.DictionaryArray.from_arrays(codes, pa.array(texts, type=pa.string()))


def _joined(arrays: Sequence[IntArray], dtype: type[Any]) -> Any:
    # In its own type at once: fresh memory is what a column costs most, and these were checked to fit.
    return np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.empty(0, dtype=dtype)


def phase_spans(steps: Sequence[RankStep]) -> TableColumns:
    """One row per phase interval."""
    of = _Repeated([len(step.phases) for step in steps])
    flags = _joined([step.phases.flags for step in steps], np.uint16)
    starts = _joined([step.phases.start_offset_ns + step.start_unix_ns for step in steps], np.int64)
    columns = {
        "run_id": of.texts([step.run_id for step in steps]),
        "step": of.numbers([step.step for step in steps], np.uint64),
        "layer": _joined([step.phases.layer for step in steps], np.int16),
        "phase": _texts(_joined([step.phases.phase for step in steps], np.int8), _PHASES),
        "direction": _texts(_joined([step.phases.direction for step in steps], np.int8), _DIRECTIONS),
        "microbatch": _joined([step.phases.microbatch for step in steps], np.uint16),
        "ordinal": _joined([step.phases.ordinal for step in steps], np.uint16),
        "rank": of.numbers([step.rank for step in steps], np.uint32),
        "is_barrier": (flags & int(RowFlag.BARRIER)).astype(np.uint8),
        "ep_group": of.numbers([step.ep_group for step in steps], np.uint32),
        "ep_rank": of.numbers([step.ep_rank for step in steps], np.uint32),
        "forward_mode": of.texts([step.forward_mode.value for step in steps]),
        "cohort": of.texts([step.cohort for step in steps]),
        "stream": _joined([step.phases.stream for step in steps], np.uint16),
        "flags": flags,
        "start_time": pa.array(starts, type=_NS),
        "duration_ns": _joined([step.phases.duration_ns for step in steps], np.int64),
        "bytes": _joined([step.phases.bytes for step in steps], np.int64),
        "rows": _joined([step.phases.rows for step in steps], np.int64),
        "record_microbatch": of.numbers([step.microbatch for step in steps], np.uint16),
        "position": _joined([np.arange(len(step.phases)) for step in steps], np.uint32),
    }
    return TableColumns(table="phase_spans", arrow=pa.table(columns))


def expert_loads(steps: Sequence[RankStep]) -> TableColumns:
    """One row per expert, layer and kind. Zeros are kept for routed, so that a dead expert shows."""
    entries = [(step, entry) for step in steps for entry in step.experts]
    experts = [_kept_experts(entry.kind, entry.counts) for _, entry in entries]
    return _expert_counts("expert_loads", entries, experts)


def unfolded_expert_loads(steps: Sequence[RankStep]) -> TableColumns:
    """The same of counts that are not folded yet. Zeros are kept: a map belongs to so many numbers."""
    entries = [(step, entry) for step in steps for entry in step.unfolded]
    return _expert_counts(
        "unfolded_expert_loads", entries, [np.arange(len(entry.counts)) for _, entry in entries]
    )


def _expert_counts(
    table: str, entries: Sequence[tuple[RankStep, ExpertCounts]], experts: Sequence[IntArray]
) -> TableColumns:
    counts = [entry.counts[chosen] for (_, entry), chosen in zip(entries, experts, strict=True)]
    of = _Repeated([len(chosen) for chosen in experts])
    step_times = of.numbers([step.start_unix_ns // NS_PER_MS for step, _ in entries], np.int64)
    columns = {
        "run_id": of.texts([step.run_id for step, _ in entries]),
        "step": of.numbers([step.step for step, _ in entries], np.uint64),
        "layer": of.numbers([entry.layer for _, entry in entries], np.int16),
        "count_kind": of.texts([_COUNT_KINDS[entry.kind] for _, entry in entries]),
        "forward_mode": of.texts([step.forward_mode.value for step, _ in entries]),
        "cohort": of.texts([step.cohort for step, _ in entries]),
        "rank": of.numbers([step.rank for step, _ in entries], np.uint32),
        "microbatch": of.numbers([step.microbatch for step, _ in entries], np.uint16),
        "expert": _joined(experts, np.uint32),
        "count": _joined(counts, np.int64),
        "placement_version": of.numbers([step.placement_version for step, _ in entries], np.uint32),
        "step_time": pa.array(step_times, type=_MS),
    }
    return TableColumns(table=table, arrow=pa.table(columns))


def _kept_experts(kind: int, counts: IntArray) -> IntArray:
    """Experts that get a row.

    Zeros are kept for routed, so that a dead expert shows. The other kinds are sparse, but the last expert
    of received is kept: a rank that got no rows is not one that did not count, and a reader can tell how
    many experts there are.
    """
    if kind == _ROUTED:
        return np.arange(len(counts))
    experts = counts.nonzero()[0]
    last = len(counts) - 1
    if kind == _RECEIVED and (not len(experts) or experts[-1] != last):
        experts = np.append(experts, last)
    return experts


def rank_traffic(steps: Sequence[RankStep]) -> TableColumns:
    """One row per destination rank, layer and exchange."""
    entries = [(step, entry) for step in steps for entry in step.traffic]
    of = _Repeated([len(entry.rows) for _, entry in entries])
    step_times = of.numbers([step.start_unix_ns // NS_PER_MS for step, _ in entries], np.int64)
    columns = {
        "run_id": of.texts([step.run_id for step, _ in entries]),
        "step": of.numbers([step.step for step, _ in entries], np.uint64),
        "layer": of.numbers([entry.layer for _, entry in entries], np.int16),
        "phase": of.texts([_PHASES[entry.phase] for _, entry in entries]),
        "forward_mode": of.texts([step.forward_mode.value for step, _ in entries]),
        "source_rank": of.numbers([step.rank for step, _ in entries], np.uint32),
        "destination_ep_rank": _joined([np.arange(len(entry.rows)) for _, entry in entries], np.uint32),
        "microbatch": of.numbers([step.microbatch for step, _ in entries], np.uint16),
        "rows": _joined([entry.rows for _, entry in entries], np.int64),
        "bytes": _joined([entry.rows * entry.row_bytes for _, entry in entries], np.int64),
        "source_host": of.texts([step.host_name for step, _ in entries]),
        "step_time": pa.array(step_times, type=_MS),
        "direction": of.texts([_DIRECTIONS[entry.direction] for _, entry in entries]),
    }
    return TableColumns(table="rank_traffic", arrow=pa.table(columns))


def expert_coactivation(steps: Sequence[RankStep]) -> TableColumns:
    """One row per pair of experts that shared tokens."""
    entries = [(step, step.coactivation) for step in steps if step.coactivation is not None]
    of = _Repeated([len(pairs) for _, pairs in entries])
    step_times = of.numbers([step.start_unix_ns // NS_PER_MS for step, _ in entries], np.int64)
    columns = {
        "run_id": of.texts([step.run_id for step, _ in entries]),
        "step": of.numbers([step.step for step, _ in entries], np.uint64),
        "layer": _joined([pairs.layer for _, pairs in entries], np.int16),
        "span": _texts(_joined([pairs.span for _, pairs in entries], np.int8), _SPANS),
        "forward_mode": of.texts([step.forward_mode.value for step, _ in entries]),
        "cohort": of.texts([step.cohort for step, _ in entries]),
        "rank": of.numbers([step.rank for step, _ in entries], np.uint32),
        "microbatch": of.numbers([step.microbatch for step, _ in entries], np.uint16),
        "first": _joined([pairs.first for _, pairs in entries], np.uint16),
        "second": _joined([pairs.second for _, pairs in entries], np.uint16),
        "tokens": _joined([pairs.count for _, pairs in entries], np.uint32),
        "step_time": pa.array(step_times, type=_MS),
    }
    return TableColumns(table="expert_coactivation", arrow=pa.table(columns))
