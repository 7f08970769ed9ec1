"""Placements, reports, and a ledger in memory, for tests of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from moetrace_collectors.ledger.chain import LedgerRow
from moetrace_collectors.model import PlacementReport
from moetrace_collectors.testing import any_value
from moetrace_schemas import SCHEMA_VERSION, attributes, identity
from moetrace_schemas.columns import PLACEMENT, pack
from moetrace_schemas.enums import PlacementEvent
from moetrace_schemas.placement import PlacementMap, PlacementTerms

EVEN = ((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7))
"""Two layers of eight experts on four ranks, in order."""
SWAPPED = ((2, 1, 0, 3, 4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7))
"""Experts 0 and 2 of layer 0 on each other's ranks."""


def placement(
    rows: tuple[tuple[int, ...], ...] = EVEN, *, ranks: int = 4, layers: tuple[int, ...] | None = None
) -> PlacementMap:
    """A map; layers are numbered from 0."""
    return PlacementMap(
        layers=tuple(range(len(rows))) if layers is None else layers,
        physical_to_logical=rows,
        num_experts=1 + max(max(row) for row in rows),
        num_ranks=ranks,
    )


def report(
    version: int,
    rows: tuple[tuple[int, ...], ...] = EVEN,
    *,
    run_id: str = "run",
    step: int = 0,
    event: PlacementEvent = PlacementEvent.ANNOUNCED,
    ranks: int = 4,
    layers: tuple[int, ...] | None = None,
    **terms: Any,
) -> PlacementReport:
    """A report of rank 0."""
    return PlacementReport(
        run_id=run_id,
        version=version,
        step=step,
        rank=0,
        event=event,
        mapping=placement(rows, ranks=ranks, layers=layers),
        terms=PlacementTerms(**terms),
        host_name="host-0",
    )


def placement_span(told: PlacementReport, *, world_size: int = 4, **changes: Any) -> Span:
    """The OTLP span of a report; `changes` set attributes by constant name, None leaves one out."""
    mapping = told.mapping
    values: dict[str, Any] = {
        "SCHEMA_VERSION": SCHEMA_VERSION,
        "RUN_ID": told.run_id,
        "STEP_INDEX": told.step,
        "RANK": told.rank,
        "WORLD_SIZE": world_size,
        "PLACEMENT_VERSION": told.version,
        "PLACEMENT_EXPERTS": mapping.num_experts,
        "PLACEMENT_RANKS": mapping.num_ranks,
        "PLACEMENT_DIGEST": mapping.digest(),
        "COLUMNS_PLACEMENT": pack(
            PLACEMENT,
            [list(mapping.layers), [len(row) for row in mapping.physical_to_logical]],
            [expert for row in mapping.physical_to_logical for expert in row],
        ),
        "PLACEMENT_KIND": told.event.value,
        "PLACEMENT_COUNTS": told.terms.count_ids.value,
        **changes,
    }
    trace = identity.trace_id(told.run_id, told.step)
    return Span(
        trace_id=trace.to_bytes(16, "big"),
        span_id=identity.placement_span_id(trace, told.version, told.rank).to_bytes(8, "big"),
        name="moe.placement",
        start_time_unix_nano=1_900_000_000_000_000_000,
        attributes=[
            KeyValue(key=getattr(attributes, name), value=any_value(value))
            for name, value in values.items()
            if value is not None
        ],
    )


@dataclass
class MemoryLedger:
    """A LedgerStore that is a list."""

    rows: list[LedgerRow] = field(default_factory=list)
    slots: dict[tuple[str, int], PlacementMap] = field(default_factory=dict)

    def of_run(self, run_id: str) -> list[LedgerRow]:
        """Rows of one run in order."""
        return [row for row in self.rows if row.run_id == run_id]

    def head(self, run_id: str) -> LedgerRow | None:
        """See LedgerStore."""
        return next(reversed(self.of_run(run_id)), None)

    def of_version(self, run_id: str, version: int) -> list[LedgerRow]:
        """See LedgerStore."""
        return [
            row
            for row in self.of_run(run_id)
            if row.version == version and row.event in ("announced", "proposed")
        ]

    def newest_mappings(self, run_id: str) -> list[LedgerRow]:
        """See LedgerStore."""
        return [row for row in reversed(self.of_run(run_id)) if row.event == "announced"]

    def newest_applied(self, run_id: str) -> LedgerRow | None:
        """See LedgerStore."""
        return next((row for row in reversed(self.of_run(run_id)) if row.event == "applied"), None)

    def insert(self, row: LedgerRow) -> None:
        """See LedgerStore."""
        self.rows.append(row)

    def insert_slots(self, run_id: str, version: int, mapping: PlacementMap) -> None:
        """See LedgerStore."""
        self.slots[(run_id, version)] = mapping
