"""The ledger as readers see it: rows through any store, and their text and JSON. No writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger import ledger_rows as names
from moetrace_collectors.ledger.chain import Fault, LedgerRow, Link
from moetrace_collectors.ledger.transition import mapping_of, overlay
from moetrace_collectors.number_format import count
from moetrace_collectors.views.store_rows import Store
from moetrace_schemas.enums import PlacementEvent
from moetrace_schemas.placement import PlacementMap


def ledger_runs(store: Store) -> list[str]:
    """Runs that have a ledger, the newest first."""
    return [str(row["run_id"]) for row in store.rows(names.RUNS, {})]


def choose_ledger(store: Store, run_id: str | None) -> str:
    """The run asked for, or the one whose ledger was written last.

    Raises:
        UsageError: there is no ledger of it.
    """
    known = ledger_runs(store)
    if run_id is not None and run_id in known:
        return run_id
    if not known:
        raise UsageError(f"{store.address} holds no placement ledger yet: nothing was announced or recorded")
    if run_id is not None:
        raise UsageError(
            f"{store.address} holds no placement ledger of run {run_id!r}: it holds {', '.join(known[:5])}"
        )
    return known[0]


def read_ledger(store: Store, run_id: str) -> list[LedgerRow]:
    """All rows of a run, by sequence."""
    return list(ledger_rows_of(store, run_id))


def ledger_rows_of(store: Store, run_id: str) -> Iterator[LedgerRow]:
    """All rows of a run, by sequence, a page in memory at a time."""
    first = 0
    while True:
        page = [names.ledger_row(row) for row in store.rows(names.PAGE, {"run": run_id, "first": first})]
        if len(page) < names.PAGE_ROWS:
            yield from page
            return
        # Rows of a fork share a number: those of the last one are read together.
        last = page[-1].sequence
        yield from (row for row in page if row.sequence < last)
        forked = store.rows(names.AT_SEQUENCE, {"run": run_id, "first": last})
        yield from (names.ledger_row(row) for row in forked)
        first = last + 1


def count_rows(store: Store, run_id: str) -> tuple[int, int]:
    """Rows of a run's ledger, and the highest version in it."""
    (row,) = store.rows(names.NUM_ROWS, {"run": run_id})
    return int(row["num_rows"]), int(row["newest_version"])


def announced(store: Store, run_id: str, version: int) -> tuple[PlacementMap | None, int | None]:
    """Mapping and bytes of an expert as they were announced of a version; None for what was not."""
    found: PlacementMap | None = None
    expert_bytes: int | None = None
    for row in store.rows(names.OF_VERSION, {"run": run_id, "version": version}):
        told = names.ledger_row(row)
        if told.event == PlacementEvent.ANNOUNCED:
            found = overlay(found, mapping_of(told))
            size = json.loads(told.document).get("memory", {}).get("expert_bytes")
            expert_bytes = expert_bytes if size is None else int(size)
    return found, expert_bytes


def row_document(row: LedgerRow, *, with_mapping: bool) -> dict[str, Any]:
    """One row as plain JSON types; the document inside it is unfolded."""
    try:
        document = json.loads(row.document)
    except ValueError:
        document = {"unreadable": row.document[:200]}
    if not with_mapping and isinstance(document, dict):
        document.pop("placement", None)
        if isinstance(document.get("migration"), dict):
            document["migration"].pop("moves", None)
    return {
        "run_id": row.run_id,
        "sequence": row.sequence,
        "time_unix_ms": row.time_unix_ms,
        "event": row.event,
        "version": row.version,
        "previous_version": row.previous_version or None,
        "rollback_version": row.rollback_version or None,
        "step": row.step,
        "digest": row.digest or None,
        "policy_version": row.policy_version,
        "proposed_by": row.proposed_by,
        "memory": row.memory or None,
        "experts_copied": row.experts_copied,
        "copied_bytes": row.copied_bytes,
        "replicas_added": row.replicas_added,
        "verdict": row.verdict or None,
        "previous_hash": row.previous_hash,
        "row_hash": row.row_hash,
        "document": document,
    }


def ledger_text(rows: Sequence[LedgerRow]) -> str:
    """A line per row."""
    lines = [f"{'row':>4}  {'when (UTC)':<19}  {'event':<9}  {'version':>7}  {'from step':>9}  what"]
    for row in rows:
        when = datetime.fromtimestamp(row.time_unix_ms / 1000, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
        step = "-" if row.step is None else str(row.step)
        lines.append(
            f"{row.sequence:>4}  {when:<19}  {row.event:<9}  {row.version:>7}  {step:>9}  {_what(row)}"
        )
    return "\n".join(lines) + "\n"


def _what(row: LedgerRow) -> str:
    parts = []
    if row.verdict:
        to = f" -> roll back to version {row.rollback_version}" if row.verdict == "regressed" else ""
        parts.append(row.verdict.replace("_", " ") + to)
    if row.previous_version:
        parts.append(f"after version {row.previous_version}")
    if row.experts_copied is not None:
        size = "" if row.copied_bytes is None else f" ({row.copied_bytes / 1e9:.2f} GB)"
        parts.append(f"{count(row.experts_copied, 'expert')} to copy{size}")
    if row.replicas_added:
        parts.append(f"{row.replicas_added:+d} {'replica' if abs(row.replicas_added) == 1 else 'replicas'}")
    if row.memory in ("fits", "does_not_fit"):
        parts.append(f"memory {row.memory.replace('_', ' ')}")
    if row.proposed_by:
        parts.append(f"by {row.proposed_by}")
    if row.digest:
        parts.append(f"mapping {row.digest[:12]}")
    return ", ".join(parts) or "mapping not known"


def verify_document(run_id: str, links: Sequence[Link], faults: Sequence[Fault]) -> dict[str, Any]:
    """What a verification found, as plain JSON types; links in order."""
    return {
        "run_id": run_id,
        "rows": len(links),
        "head": links[-1].row_hash if links else None,
        "sound": not faults,
        "faults": [
            {"kind": fault.kind.value, "sequence": fault.sequence, "sentence": fault.sentence}
            for fault in faults
        ],
    }
