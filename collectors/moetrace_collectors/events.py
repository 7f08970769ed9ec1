"""What the collector could not join or store as it came: records for dead letter and store. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moetrace_schemas.enums import RejectReason

MAX_PAYLOAD_BYTES = 16_384
"""Bytes of a rejected message that are kept."""


class EventKind(StrEnum):
    """Kind of a collector event; the `kind` column of collector_events."""

    LATE = "late"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"
    PARTIAL = "partial"
    STARTED = "started"
    STOPPED = "stopped"
    REPLAYED = "replayed"
    WAL_DAMAGED = "wal_damaged"
    RUN_ID_REUSED = "run_id_reused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One rank step, or one request that cannot be split, that was turned away."""

    reason: RejectReason
    detail: str
    """One line: what was wrong, where, and what was expected."""
    run_id: str = ""
    """Empty where it cannot be told."""
    step: int | None = None
    rank: int | None = None
    payload: bytes = b""
    """What came, cut to MAX_PAYLOAD_BYTES; for the dead letter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorEvent:
    """One row of collector_events."""

    time_unix_ms: int
    kind: EventKind
    reason: str
    run_id: str = ""
    step: int | None = None
    rank: int | None = None
    detail: str = ""
