"""A comparison that a person made -> a row of event judged, behind what the collector wrote."""

from __future__ import annotations

from typing import Any

from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger import ledger_rows
from moetrace_collectors.ledger.chain import LedgerRow
from moetrace_collectors.ledger.reading import announced
from moetrace_collectors.ledger.writing import Target, open_recorder, wait_for_row
from moetrace_collectors.model import PlacementReport
from moetrace_schemas.enums import PlacementEvent
from moetrace_schemas.placement import PlacementTerms, canonical_json


def record_verdict(
    target: Target, document: dict[str, Any], *, run_id: str, version: int, database: str
) -> LedgerRow:
    """Append the comparison; the last row where that says the same already.

    Raises:
        UsageError: the store or the collector does not take it, or the version has no mapping to send.
    """
    if target.url is None:
        with open_recorder(target, database=database) as (recorder, _):
            return recorder.judged(document, run_id=run_id, version=version)[1]
    from moetrace_collectors.ledger.placement_request import send
    from moetrace_collectors.views.store_rows import HttpStore

    store = HttpStore(target.url, database=database)
    mapping, _ = announced(store, run_id, version)
    if mapping is None:
        raise UsageError(
            f"--record: the ledger of run {run_id} has no mapping of version {version}: announce it "
            "(moetrace.placement), or record it in force (moetrace placement record)"
        )
    text = canonical_json(document).decode()

    def found() -> LedgerRow | None:
        rows = store.rows(ledger_rows.JUDGED_OF_VERSION, {"run": run_id, "version": version})
        told = [ledger_rows.ledger_row(row) for row in rows]
        return next((row for row in told if row.document == text), None)

    report = PlacementReport(
        run_id=run_id,
        version=version,
        step=0,
        rank=0,
        event=PlacementEvent.JUDGED,
        mapping=mapping,
        terms=PlacementTerms(),
        comparison=text,
    )
    send(target.url, report, world_size=max(mapping.num_ranks, 1))
    return wait_for_row(target.url, "verdict", found)
