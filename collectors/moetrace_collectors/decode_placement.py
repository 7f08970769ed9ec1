"""A `moe.placement` span -> PlacementReport, with everything checked. Part of the decode stage; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from moetrace_collectors.model import PlacementReport
from moetrace_schemas import SCHEMA_VERSION, attributes, identity
from moetrace_schemas.columns import HEADER, PLACEMENT, ColumnsError, read_header
from moetrace_schemas.enums import ChangeVerdict, CountIds, PlacementEvent, RejectReason
from moetrace_schemas.placement import (
    MAX_CELLS,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_VERSION,
    MAX_WEIGHTS,
    PlacementError,
    PlacementMap,
    PlacementTerms,
    canonical_json,
)

MAX_STEP = identity.HIGHEST_STEP
MAX_SIZE = 2**53
MAX_WEIGHTS_TEXT = MAX_WEIGHTS * 256
"""Characters of the digests' JSON."""
_FIELDS = {"string": "string_value", "int": "int_value", "double": "double_value", "bytes": "bytes_value"}
MAX_COMPARISON_TEXT = 1 << 18
_TOLD = (PlacementEvent.ANNOUNCED, PlacementEvent.PROPOSED, PlacementEvent.JUDGED)


class PlacementRejectedError(Exception):
    """The span is no placement that can be kept."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def decode_placement(
    span: Span, values: Mapping[str, AnyValue], host_name: str, *, max_world_size: int
) -> PlacementReport:
    """One placement.

    Raises:
        PlacementRejectedError: an attribute is missing or wrong, the map is none, or digests differ.
    """
    reader = _Reader(values)
    version = reader.integer(attributes.SCHEMA_VERSION, 0, MAX_VERSION, default=0)
    if not 1 <= version <= SCHEMA_VERSION:
        raise PlacementRejectedError(
            RejectReason.UNSUPPORTED_SCHEMA_VERSION,
            f"{attributes.SCHEMA_VERSION} is {version}, this collector reads up to {SCHEMA_VERSION}: "
            "upgrade the collector first",
        )
    for name in attributes.PLACEMENT_REQUIRED:
        if name not in values:
            raise PlacementRejectedError(RejectReason.MISSING_ATTRIBUTE, f"{name} is missing")
    run_id = reader.text(attributes.RUN_ID)
    if identity.RUN_ID_PATTERN.fullmatch(run_id) is None:
        raise _invalid(f"{attributes.RUN_ID} is {run_id!r}: 1 to 128 of [A-Za-z0-9._:-] expected")
    step = reader.integer(attributes.STEP_INDEX, 0, MAX_STEP)
    if len(span.trace_id) != 16 or int.from_bytes(span.trace_id, "big") != identity.trace_id(run_id, step):
        raise PlacementRejectedError(
            RejectReason.IDENTITY_MISMATCH,
            f"trace id {span.trace_id.hex()} is not the one of run {run_id}, step {step}",
        )
    world_size = reader.integer(attributes.WORLD_SIZE, 1, max_world_size)
    try:
        mapping = _mapping(
            reader.block(attributes.COLUMNS_PLACEMENT),
            num_experts=reader.integer(attributes.PLACEMENT_EXPERTS, 1, MAX_EXPERTS),
            num_ranks=reader.integer(attributes.PLACEMENT_RANKS, 1, max_world_size),
        )
    except (ColumnsError, PlacementError) as error:
        raise PlacementRejectedError(RejectReason.MALFORMED_COLUMNS, str(error)) from error
    told = reader.text(attributes.PLACEMENT_DIGEST)
    if told != mapping.digest():
        raise PlacementRejectedError(
            RejectReason.MALFORMED_COLUMNS,
            f"{attributes.PLACEMENT_DIGEST} is {told[:64]}: the mapping has {mapping.digest()}",
        )
    event = _event(reader.text(attributes.PLACEMENT_KIND, PlacementEvent.ANNOUNCED.value))
    return PlacementReport(
        run_id=run_id,
        version=reader.integer(attributes.PLACEMENT_VERSION, 0, MAX_VERSION),
        step=step,
        rank=reader.integer(attributes.RANK, 0, world_size - 1),
        event=event,
        mapping=mapping,
        terms=_terms(reader),
        host_name=host_name,
        comparison=(
            _comparison(reader.text(attributes.PLACEMENT_COMPARISON, ""), run_id)
            if event is PlacementEvent.JUDGED
            else ""
        ),
    )


def _event(text: str) -> PlacementEvent:
    known = {event.value: event for event in _TOLD}
    if text not in known:
        raise _invalid(f"{attributes.PLACEMENT_KIND} is {text[:64]!r}: {' or '.join(known)} expected")
    return known[text]


def _mapping(block: bytes, *, num_experts: int, num_ranks: int) -> PlacementMap:
    num_rows = read_header(PLACEMENT, block)
    if not 1 <= num_rows <= MAX_LAYERS:
        raise ColumnsError(f"block kind {PLACEMENT.kind}: {num_rows} layers, 1 to {MAX_LAYERS} expected")
    layers = np.frombuffer(block, dtype="<i2", count=num_rows, offset=HEADER.size)
    lengths = np.frombuffer(block, dtype="<u4", count=num_rows, offset=HEADER.size + 2 * num_rows)
    offset = HEADER.size + 6 * num_rows
    total = int(lengths.sum(dtype=np.int64))
    if total > MAX_CELLS or len(block) - offset != total * 8:
        raise ColumnsError(
            f"block kind {PLACEMENT.kind}: {total} values of 8 bytes expected behind the layers (at most "
            f"{MAX_CELLS}), got {len(block) - offset} bytes"
        )
    values = np.frombuffer(block, dtype="<i8", count=total, offset=offset)
    ends = np.cumsum(lengths, dtype=np.int64)[:-1]
    return PlacementMap(
        layers=tuple(layers.tolist()),
        physical_to_logical=tuple(tuple(row.tolist()) for row in np.split(values, ends)),
        num_experts=num_experts,
        num_ranks=num_ranks,
    )


def _terms(reader: _Reader) -> PlacementTerms:
    first = reader.optional_integer(attributes.PLACEMENT_WINDOW_FIRST, MAX_STEP)
    last = reader.optional_integer(attributes.PLACEMENT_WINDOW_LAST, MAX_STEP)
    counts = reader.text(attributes.PLACEMENT_COUNTS, CountIds.LOGICAL.value)
    if counts not in list(CountIds):
        raise _invalid(f"{attributes.PLACEMENT_COUNTS} is {counts[:64]!r}: {' or '.join(CountIds)} expected")
    defaults = PlacementTerms()
    try:
        return PlacementTerms(
            policy_version=reader.text(attributes.PLACEMENT_POLICY, ""),
            proposed_by=reader.text(attributes.PLACEMENT_PROPOSER, ""),
            window=None if first is None or last is None else (first, last),
            max_slowdown=reader.number(attributes.PLACEMENT_ACCEPT_SLOWDOWN, defaults.max_slowdown),
            max_error_rate=reader.number(attributes.PLACEMENT_ACCEPT_ERRORS, defaults.max_error_rate),
            rollback_version=reader.optional_integer(attributes.PLACEMENT_ROLLBACK, MAX_VERSION),
            count_ids=CountIds(counts),
            expert_bytes=reader.optional_integer(attributes.PLACEMENT_EXPERT_BYTES, MAX_SIZE),
            memory_bytes=reader.optional_integer(attributes.PLACEMENT_MEMORY_BYTES, MAX_SIZE),
            weight_digests=_weights(reader.text(attributes.PLACEMENT_WEIGHTS, "{}")),
        )
    except PlacementError as error:
        raise _invalid(str(error)) from error


def _comparison(text: str, run_id: str) -> str:
    """The comparison as canonical JSON; of it only what the ledger's columns need is looked at."""
    name = attributes.PLACEMENT_COMPARISON
    if not 1 <= len(text) <= MAX_COMPARISON_TEXT:
        raise _invalid(f"{name}: {len(text)} characters, 1 to {MAX_COMPARISON_TEXT} expected")
    try:
        told = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or told.get("run_id") != run_id:
        raise _invalid(f"{name}: a comparison of run {run_id} as a JSON object expected")
    if told.get("verdict") not in list(ChangeVerdict):
        raise _invalid(f"{name}: verdict {' or '.join(ChangeVerdict)} expected")
    rollback = told.get("rollback_version")
    if rollback is not None and (type(rollback) is not int or not 0 <= rollback <= MAX_VERSION):
        raise _invalid(f"{name}: rollback_version null or 0 to {MAX_VERSION} expected")
    try:
        return canonical_json(told).decode()
    except ValueError as error:
        raise _invalid(f"{name}: {error}"[:200]) from error


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _weights(text: str) -> dict[str, str]:
    if len(text) > MAX_WEIGHTS_TEXT:
        raise _invalid(f"{attributes.PLACEMENT_WEIGHTS}: {len(text)} characters, at most {MAX_WEIGHTS_TEXT}")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise _invalid(f"{attributes.PLACEMENT_WEIGHTS}: a JSON object of name to digest expected")
    return told


class _Reader:
    """Typed reads of a span's attributes."""

    def __init__(self, values: Mapping[str, AnyValue]) -> None:
        self._values = values

    def text(self, name: str, default: str | None = None) -> str:
        if default is not None and name not in self._values:
            return default
        return str(self._typed(name).string_value)

    def block(self, name: str) -> bytes:
        return bytes(self._typed(name).bytes_value)

    def number(self, name: str, default: float) -> float:
        return float(self._typed(name).double_value) if name in self._values else default

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        if default is not None and name not in self._values:
            return default
        value = int(self._typed(name).int_value)
        if not low <= value <= high:
            raise _invalid(f"{name} is {value}: {low} to {high} expected")
        return value

    def optional_integer(self, name: str, high: int) -> int | None:
        return self.integer(name, 0, high) if name in self._values else None

    def _typed(self, name: str) -> AnyValue:
        value = self._values[name]
        wanted, got = _FIELDS[attributes.TYPES[name]], value.WhichOneof("value")
        if got != wanted:
            raise _invalid(f"{name}: {attributes.TYPES[name]} expected, got {str(got or 'empty')[:32]}")
        return value


def _invalid(detail: str) -> PlacementRejectedError:
    return PlacementRejectedError(RejectReason.INVALID_ATTRIBUTE, detail)
