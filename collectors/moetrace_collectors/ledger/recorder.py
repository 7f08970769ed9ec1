"""Appends to the ledger: decides what a report is, and links the row that says so behind the last one.

The state is read from the store at every append: changes are rare, and whoever else appends (another
collector, `moetrace placement record`) is then seen.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

from moetrace_collectors.ledger.chain import LedgerRow, append
from moetrace_collectors.ledger.transition import applied_row, judged_row, mapping_of, mapping_row, overlay
from moetrace_collectors.model import PlacementReport
from moetrace_schemas.enums import PlacementEvent
from moetrace_schemas.placement import PlacementMap, canonical_json


class LedgerStore(Protocol):
    """What the recorder needs of a store; every call may raise what its transport raises."""

    def head(self, run_id: str) -> LedgerRow | None:
        """The last row of a run's chain."""

    def of_version(self, run_id: str, version: int) -> list[LedgerRow]:
        """Rows that hold a mapping of this version."""

    def newest_mappings(self, run_id: str) -> list[LedgerRow]:
        """Announced mappings, the newest first."""

    def newest_applied(self, run_id: str) -> LedgerRow | None:
        """The epoch that was last seen to begin."""

    def insert(self, row: LedgerRow) -> None:
        """Append one row."""

    def insert_slots(self, run_id: str, version: int, mapping: PlacementMap) -> None:
        """Keep a mapping slot by slot; again is no harm."""


class Outcome(StrEnum):
    """What became of a report."""

    RECORDED = "recorded"
    REPEATED = "repeated"
    CONFLICTING = "conflicting"


class Recorder:
    """Appends rows to one store."""

    def __init__(self, store: LedgerStore, *, unix_ms: Callable[[], int]) -> None:
        self._store = store
        self._unix_ms = unix_ms

    def record(self, report: PlacementReport) -> tuple[Outcome, LedgerRow | None]:
        """Append a mapping that was announced or proposed, unless it is there already."""
        digest = report.mapping.digest()
        known = self._store.of_version(report.run_id, report.version)
        for row in known:
            if row.digest == digest and row.event == report.event:
                # A retry of ours may have been cut off between the two inserts.
                self._store.insert_slots(report.run_id, report.version, report.mapping)
                return Outcome.REPEATED, row
        if any(row.digest != digest and self._overlaps(row, report.mapping) for row in known):
            return Outcome.CONFLICTING, None
        version, before = self._before(report)
        in_force = overlay(before, report.mapping)
        row = self.append(
            mapping_row(
                report,
                before=before,
                before_version=version,
                in_force=in_force,
                time_unix_ms=self._unix_ms(),
            )
        )
        self._store.insert_slots(report.run_id, report.version, report.mapping)
        return Outcome.RECORDED, row

    def applied(self, *, run_id: str, version: int, step: int, num_ranks: int) -> LedgerRow | None:
        """Append the first step of an epoch; None where it is in the ledger already."""
        newest = self._store.newest_applied(run_id)
        if newest is not None and (newest.version == version or (newest.step or 0) >= step):
            return None
        announced = [
            row for row in self._store.of_version(run_id, version) if row.event == PlacementEvent.ANNOUNCED
        ]
        before = 0 if newest is None else newest.version
        rollback = announced[-1].rollback_version if announced else before
        return self.append(
            applied_row(
                run_id=run_id,
                version=version,
                before_version=before,
                rollback_version=rollback,
                step=step,
                digest=announced[-1].digest if announced else "",
                num_ranks=num_ranks,
                time_unix_ms=self._unix_ms(),
            )
        )

    def judged(self, document: dict[str, Any], *, run_id: str, version: int) -> tuple[Outcome, LedgerRow]:
        """Append what a change was judged to be, unless that is what the last row says."""
        text = canonical_json(document).decode()
        head = self._store.head(run_id)
        if head is not None and (head.event, head.version, head.document) == (
            PlacementEvent.JUDGED,
            version,
            text,
        ):
            return Outcome.REPEATED, head
        mapped = [
            row for row in self._store.of_version(run_id, version) if row.event == PlacementEvent.ANNOUNCED
        ]
        applied = self._store.newest_applied(run_id)
        is_current = applied is not None and applied.version == version
        row = self.append(
            judged_row(
                run_id=run_id,
                version=version,
                before_version=applied.previous_version if applied is not None and is_current else 0,
                rollback_version=document["rollback_version"] or 0,
                digest=mapped[-1].digest if mapped else "",
                verdict=document["verdict"],
                document=text,
                time_unix_ms=self._unix_ms(),
            )
        )
        return Outcome.RECORDED, row

    def append(self, row: LedgerRow) -> LedgerRow:
        """Link a row behind the last one and write it."""
        linked = append(self._store.head(row.run_id), row)
        self._store.insert(linked)
        return linked

    def mapping(self, run_id: str, version: int) -> PlacementMap | None:
        """The announced mapping of an epoch, all its pipeline stages together."""
        found: PlacementMap | None = None
        for row in self._store.of_version(run_id, version):
            if row.event == PlacementEvent.ANNOUNCED:
                found = overlay(found, mapping_of(row))
        return found

    def _before(self, report: PlacementReport) -> tuple[int, PlacementMap | None]:
        """Version and mapping in force before a report, layer by layer the newest ones.

        An epoch that was seen to begin after the last announcement is a rollback to a mapping of before.
        """
        announced = [
            row for row in self._store.newest_mappings(report.run_id) if row.version != report.version
        ]
        found: PlacementMap | None = None
        for row in reversed(announced):
            found = overlay(found, mapping_of(row))
        applied = self._store.newest_applied(report.run_id)
        if applied is None or (announced and announced[0].sequence > applied.sequence):
            return (announced[0].version if announced else 0), found
        version = applied.previous_version if applied.version == report.version else applied.version
        in_force = self.mapping(report.run_id, version)
        return version, found if in_force is None else overlay(found, in_force)

    @staticmethod
    def _overlaps(row: LedgerRow, mapping: PlacementMap) -> bool:
        return bool(set(mapping_of(row).layers) & set(mapping.layers))
