"""`moetrace placement record`: a placement of an external planner, or of a person, into the ledger."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger.arguments import add_store_arguments

if TYPE_CHECKING:
    from moetrace_collectors.ledger.chain import LedgerRow
    from moetrace_collectors.ledger.recorder import Outcome
    from moetrace_collectors.ledger.writing import Target
    from moetrace_collectors.model import PlacementReport
    from moetrace_collectors.views.store_rows import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, and where the run is."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="JSON: a placement with its terms (placement_record.schema.json), or what moetrace replay "
        "--json printed",
    )
    add_store_arguments(parser)
    parser.add_argument(
        "--version", type=int, metavar="N", help="placement version (default: as in the file, else the next)"
    )
    parser.add_argument("--planner", metavar="NAME", help="of a replay (default: the recommended one)")
    parser.add_argument("--json", action="store_true", help="print the row as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Append one row; 0, or 1 where the ledger has another mapping under that version.

    Raises:
        UsageError: the file, the run or the store is wrong.
    """
    from moetrace_collectors.ledger.reading import ledger_text, row_document
    from moetrace_collectors.ledger.record_file import read_record
    from moetrace_collectors.ledger.recorder import Outcome
    from moetrace_collectors.ledger.writing import write_target

    record = read_record(arguments.file, planner=arguments.planner)
    target = write_target(arguments)
    if target.url is not None:
        outcome, row = _through_collector(target.url, arguments, record)
    else:
        outcome, row = _into_store(target, arguments, record)
    if row is None:
        print(
            f"moetrace: {arguments.file}: {outcome.value}: this version has another mapping in the ledger; "
            "give another --version",
            file=sys.stderr,
        )
        return 1
    if arguments.json:
        sys.stdout.write(json.dumps(row_document(row, with_mapping=True)) + "\n")
    else:
        told = "" if outcome is Outcome.RECORDED else " (it was there already)"
        sys.stdout.write(f"{outcome.value}{told}\n{ledger_text([row])}")
    return 0


def _report(arguments: argparse.Namespace, record: object, store: Store) -> PlacementReport:
    """The report of a file, with what it does not say taken from arguments and store."""
    from moetrace_collectors.ledger.record_file import RecordFile
    from moetrace_collectors.model import PlacementReport
    from moetrace_collectors.views.store_reader import choose_run
    from moetrace_schemas.enums import PlacementEvent
    from moetrace_schemas.identity import RUN_ID_PATTERN
    from moetrace_schemas.placement import MAX_VERSION

    assert isinstance(record, RecordFile)
    run_id = arguments.run_id or record.run_id or choose_run(store)
    if RUN_ID_PATTERN.fullmatch(run_id) is None:
        raise UsageError(f"run {run_id!r}: 1 to 128 of [A-Za-z0-9._:-] expected")
    version = arguments.version if arguments.version is not None else record.version
    if version is None:
        version = _next_version(store, run_id)
    if not 1 <= version <= MAX_VERSION:
        raise UsageError(f"version {version}: 1 to {MAX_VERSION} expected")
    step = record.in_force_from_step
    return PlacementReport(
        run_id=run_id,
        version=version,
        step=step or 0,
        rank=0,
        event=PlacementEvent.PROPOSED if step is None else PlacementEvent.ANNOUNCED,
        mapping=record.mapping,
        terms=record.terms,
    )


def _next_version(store: Store, run_id: str) -> int:
    from moetrace_collectors.ledger.reading import count_rows
    from moetrace_collectors.ledger.store_samples import read_epochs

    used = [count_rows(store, run_id)[1]]
    used += [epoch.version for epoch in read_epochs(store, run_id)]
    return 1 + max(used, default=0)


def _through_collector(
    url: str, arguments: argparse.Namespace, record: object
) -> tuple[Outcome, LedgerRow | None]:
    from moetrace_collectors.ledger import ledger_rows
    from moetrace_collectors.ledger.placement_request import send
    from moetrace_collectors.ledger.recorder import Outcome
    from moetrace_collectors.ledger.writing import wait_for_row
    from moetrace_collectors.views.store_rows import HttpStore

    store = HttpStore(url, database=arguments.database)
    report = _report(arguments, record, store)
    digest = report.mapping.digest()
    values: dict[str, int | str | list[int]] = {"run": report.run_id, "version": report.version}

    def found() -> list[LedgerRow]:
        return [ledger_rows.ledger_row(row) for row in store.rows(ledger_rows.OF_VERSION, values)]

    def same(rows: list[LedgerRow]) -> LedgerRow | None:
        return next((row for row in rows if (row.digest, row.event) == (digest, report.event)), None)

    before = found()
    if same(before) is not None:
        return Outcome.REPEATED, same(before)
    if any(row.digest != digest for row in before):
        return Outcome.CONFLICTING, None
    send(url, report, world_size=max(report.mapping.num_ranks, 1))
    return Outcome.RECORDED, wait_for_row(url, "placement", lambda: same(found()))


def _into_store(
    target: Target, arguments: argparse.Namespace, record: object
) -> tuple[Outcome, LedgerRow | None]:
    from moetrace_collectors.ledger.writing import open_recorder

    with open_recorder(target, database=arguments.database) as (recorder, store):
        return recorder.record(_report(arguments, record, store))
