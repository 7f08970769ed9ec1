"""`moetrace placement record`: a placement of an external planner, or of a person, into the ledger."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger.arguments import add_store_arguments

if TYPE_CHECKING:
    from moetrace_collectors.ledger.chain import LedgerRow
    from moetrace_collectors.ledger.recorder import Outcome
    from moetrace_collectors.model import PlacementReport
    from moetrace_collectors.views.store_rows import Store

WAIT_S = 10.0
"""How long a running collector may take until the row can be read."""
POLL_S = 0.05


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

    record = read_record(arguments.file, planner=arguments.planner)
    url, dsn, directory = _target(arguments)
    if url is not None:
        outcome, row = _through_collector(url, arguments, record)
    else:
        outcome, row = _into_store(dsn, directory, arguments, record)
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


def _target(arguments: argparse.Namespace) -> tuple[str | None, str, Path | None]:
    """(URL of a running collector, or DSN and run directory of a store that this process opens)."""
    from moetrace_collectors.run_directory import RunDirectory, newest_run_directory, open_run_directory
    from moetrace_collectors.store import parse_store

    if arguments.url is not None:
        return arguments.url, "", None
    if arguments.dsn is not None:
        path = parse_store(arguments.dsn).embedded_path
        if path is None:
            return None, arguments.dsn, None
        directory = RunDirectory(path=path.parent)
    else:
        directory = open_run_directory(arguments.dir) if arguments.dir is not None else newest_run_directory()
    live = directory.live_owner()
    return (None, directory.dsn, directory.path) if live is None else (live.http_address, "", None)


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
    from moetrace_collectors.ledger.reading import read_ledger
    from moetrace_collectors.ledger.store_samples import read_epochs

    used = [row.version for row in read_ledger(store, run_id)]
    used += [epoch.version for epoch in read_epochs(store, run_id)]
    return 1 + max(used, default=0)


def _through_collector(
    url: str, arguments: argparse.Namespace, record: object
) -> tuple[Outcome, LedgerRow | None]:
    from moetrace_collectors.ledger import ledger_rows
    from moetrace_collectors.ledger.placement_request import send
    from moetrace_collectors.ledger.recorder import Outcome
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
    give_up = time.monotonic() + WAIT_S
    while (row := same(found())) is None:
        if time.monotonic() > give_up:
            raise UsageError(
                f"the collector at {url} took the placement and has not written it after {WAIT_S:g} s: look "
                "at its log"
            )
        time.sleep(POLL_S)
    return Outcome.RECORDED, row


def _into_store(
    dsn: str, directory: Path | None, arguments: argparse.Namespace, record: object
) -> tuple[Outcome, LedgerRow | None]:
    from moetrace_collectors import owner
    from moetrace_collectors.ledger.client_store import ClientLedgerStore
    from moetrace_collectors.ledger.recorder import Recorder
    from moetrace_collectors.migrate import migrate
    from moetrace_collectors.store import open_client, parse_store
    from moetrace_collectors.views.store_rows import ClientStore

    address = parse_store(dsn)
    if address.embedded_path is not None and not address.embedded_path.is_dir():
        raise UsageError(f"no store at {address.display}: give a run directory with --dir")
    ownership = None if directory is None else owner.acquire(directory, address)
    try:
        client = open_client(address)
        try:
            migrate(client, database=arguments.database)
            with ClientStore(dsn, database=arguments.database) as store:
                report = _report(arguments, record, store)
            recorder = Recorder(
                ClientLedgerStore(client, database=arguments.database),
                unix_ms=lambda: time.time_ns() // 1_000_000,
            )
            return recorder.record(report)
        finally:
            client.close()
    finally:
        if ownership is not None:
            ownership.release()
