"""Ledger rows <-> columns of the store, and the SQL that reads them; column names are spelled here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moetrace_collectors.ledger.chain import LedgerRow
from moetrace_schemas.placement import PlacementMap

LEDGER_TABLE = "placement_ledger"
SLOTS_TABLE = "placement_slots"
SLOT_COLUMNS = ("run_id", "version", "layer", "slot", "ep_rank", "expert")
MAX_MAPPINGS = 64
"""Newest mappings that are looked at for the one in force: more than a model has pipeline stages."""

_NAMES = (
    "run_id", "sequence", "event", "version", "previous_version", "rollback_version", "step", "digest",
    "policy_version", "proposed_by", "memory", "experts_copied", "copied_bytes", "replicas_added", "verdict",
    "document", "previous_hash", "row_hash",
)  # fmt: skip
LEDGER_COLUMNS = (*_NAMES, "time")
_TEXTS = ("run_id", "event", "policy_version", "proposed_by", "memory", "verdict")
"""LowCardinality columns: the embedded engine's client gives plain strings of them only when asked to."""
_SELECTED = ", ".join(f"toString({name}) AS {name}" if name in _TEXTS else name for name in _NAMES)
_FROM = f"""
SELECT {_SELECTED}, toUnixTimestamp64Milli(time) AS time_unix_ms
FROM {{database:Identifier}}.{LEDGER_TABLE} AS l
WHERE l.run_id = {{run:String}}"""

PAGE_ROWS = 200
"""Rows read at once: a row holds a whole mapping, and a collector limits what an answer may hold."""
PAGE = f"{_FROM} AND l.sequence >= {{first:UInt64}} ORDER BY sequence, row_hash LIMIT {PAGE_ROWS}"
AT_SEQUENCE = f"{_FROM} AND l.sequence = {{first:UInt64}} ORDER BY row_hash"
NUM_ROWS = """
SELECT count() AS num_rows, max(version) AS newest_version
FROM {database:Identifier}.placement_ledger WHERE run_id = {run:String}
"""
HEAD = f"{_FROM} ORDER BY sequence DESC LIMIT 1"
OF_VERSION = (
    f"{_FROM} AND l.version = {{version:UInt32}} AND l.event IN ('announced', 'proposed') ORDER BY sequence"
)
JUDGED_OF_VERSION = (
    f"{_FROM} AND l.version = {{version:UInt32}} AND l.event = 'judged' ORDER BY sequence DESC"
)
NEWEST_MAPPINGS = f"{_FROM} AND l.event = 'announced' ORDER BY sequence DESC LIMIT {MAX_MAPPINGS}"
NEWEST_APPLIED = f"{_FROM} AND l.event = 'applied' ORDER BY sequence DESC LIMIT 1"
MAX_APPLIED = 20
"""Newest epochs that are looked at: more than begin within the steps that are written at once."""
LAST_APPLIED = f"{_FROM} AND l.event = 'applied' ORDER BY sequence DESC LIMIT {MAX_APPLIED}"
RUNS = """
SELECT toString(run_id) AS run_id, max(time) AS newest
FROM {database:Identifier}.placement_ledger GROUP BY run_id ORDER BY newest DESC
"""


def ledger_row(values: Mapping[str, Any]) -> LedgerRow:
    """A row as any client gives it."""
    told = {name: values[name] for name in _NAMES}
    for name in ("step", "experts_copied", "copied_bytes", "replicas_added"):
        told[name] = None if told[name] is None else int(told[name])
    for name in ("sequence", "version", "previous_version", "rollback_version"):
        told[name] = int(told[name])
    return LedgerRow(**told, time_unix_ms=int(values["time_unix_ms"]))


def ledger_values(row: LedgerRow) -> list[Any]:
    """Values in the order of LEDGER_COLUMNS; the time as milliseconds, the column's own ticks."""
    return [*(getattr(row, name) for name in _NAMES), row.time_unix_ms]


def slot_columns(run_id: str, version: int, mapping: PlacementMap) -> list[list[Any]]:
    """Columns of placement_slots in the order of SLOT_COLUMNS."""
    slots = range(mapping.num_slots)
    per_rank = mapping.num_slots // mapping.num_ranks
    count = len(mapping.layers) * mapping.num_slots
    return [
        [run_id] * count,
        [version] * count,
        [layer for layer in mapping.layers for _ in slots],
        [slot for _ in mapping.layers for slot in slots],
        [slot // per_rank for _ in mapping.layers for slot in slots],
        [expert for row in mapping.physical_to_logical for expert in row],
    ]


def in_order(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """By sequence."""
    return sorted(rows, key=lambda row: row.sequence)
