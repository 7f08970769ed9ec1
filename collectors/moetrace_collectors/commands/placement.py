"""`moetrace placement`: the ledger of placement changes, and what a change did or would do."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import TYPE_CHECKING

from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger.arguments import add_store_arguments, open_store
from moetrace_collectors.number_format import count

if TYPE_CHECKING:
    from moetrace_collectors.ledger.chain import Link
    from moetrace_collectors.views.store_rows import Store

HELP = "record, list and verify placement changes; compare before and after; score a proposal"
PARTS = {
    "record": "append a placement that a planner or a person proposes, or that is in force",
    "list": "list the ledger of a run",
    "show": "show one version or row in full",
    "verify": "check the hash chain: exit code 1 names rows that were changed, removed or moved",
    "compare": "compare steps before and after a change: accepted, regressed, or not enough evidence",
    "shadow": "score a proposed placement on recorded or live traffic without applying it",
}
PROGRESS_ROWS = 500
"""Between two lines of progress; a shorter chain needs none."""
_MODULES = {"record": "placement_record", "compare": "placement_compare", "shadow": "placement_shadow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command each."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="COMMAND")
    for name, text in PARTS.items():
        sub = parts.add_parser(name, help=text, description=text)
        if name in _MODULES:
            importlib.import_module(f"moetrace_collectors.commands.{_MODULES[name]}").add_arguments(sub)
            continue
        add_store_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print JSON instead of text")
        if name == "show":
            which = sub.add_mutually_exclusive_group(required=True)
            which.add_argument("--version", type=int, metavar="N", help="all rows of a placement version")
            which.add_argument("--row", type=int, metavar="N", help="one row by its number")
        if name == "verify":
            sub.add_argument(
                "--head", metavar="HASH", help="a hash that was noted before: finds rows that were cut off"
            )


def run(arguments: argparse.Namespace) -> int:
    """Run one part; returns the exit code."""
    if arguments.part in _MODULES:
        module = importlib.import_module(f"moetrace_collectors.commands.{_MODULES[arguments.part]}")
        code: int = module.run(arguments)
        return code
    if arguments.part == "verify":
        return _verify(arguments)
    return _list(arguments) if arguments.part == "list" else _show(arguments)


def _list(arguments: argparse.Namespace) -> int:
    from moetrace_collectors.ledger.reading import choose_ledger, ledger_text, read_ledger, row_document

    with open_store(arguments) as store:
        run_id = choose_ledger(store, arguments.run_id)
        rows = read_ledger(store, run_id)
    if arguments.json:
        documents = [row_document(row, with_mapping=False) for row in rows]
        sys.stdout.write(json.dumps({"run_id": run_id, "rows": documents}) + "\n")
    else:
        sys.stdout.write(f"run {run_id}\n{ledger_text(rows)}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from moetrace_collectors.ledger.reading import choose_ledger, ledger_text, read_ledger, row_document

    with open_store(arguments) as store:
        run_id = choose_ledger(store, arguments.run_id)
        rows = read_ledger(store, run_id)
    chosen = [
        row
        for row in rows
        if row.sequence == arguments.row or (arguments.row is None and row.version == arguments.version)
    ]
    if not chosen:
        what = f"row {arguments.row}" if arguments.row is not None else f"version {arguments.version}"
        versions = ", ".join(map(str, sorted({row.version for row in rows})))
        raise UsageError(
            f"the ledger of run {run_id} holds no {what}: it holds rows 0 to {rows[-1].sequence} of versions "
            f"{versions}"
        )
    documents = [row_document(row, with_mapping=True) for row in chosen]
    if not arguments.json:
        sys.stdout.write(ledger_text(chosen))
    sys.stdout.write(json.dumps({"run_id": run_id, "rows": documents}, indent=1) + "\n")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from moetrace_collectors.ledger.chain import verify_links
    from moetrace_collectors.ledger.reading import choose_ledger, ledger_runs, verify_document

    if arguments.head is not None and arguments.run_id is None:
        raise UsageError("--head: a hash belongs to one run; give --run too")
    documents = []
    with open_store(arguments) as store:
        if arguments.run_id is not None and arguments.head is None:
            choose_ledger(store, arguments.run_id)
        runs = ledger_runs(store) if arguments.run_id is None else [arguments.run_id]
        for run_id in runs:
            links = _links(store, run_id)
            faults = verify_links(links, expected_head=arguments.head)
            documents.append(verify_document(run_id, links, faults))
    if arguments.json:
        sys.stdout.write(json.dumps({"ledgers": documents}) + "\n")
    else:
        for document in documents:
            state = "sound" if document["sound"] else count(len(document["faults"]), "fault")
            print(
                f"run {document['run_id']}: {count(document['rows'], 'row')}, {state}, head "
                f"{document['head'] or '-'}"
            )
            for fault in document["faults"]:
                print(f"  {fault['kind']}: {fault['sentence']}")
        if not documents:
            print("no ledger yet: nothing was announced or recorded")
    return 0 if all(document["sound"] for document in documents) else 1


def _links(store: Store, run_id: str) -> list[Link]:
    """Every row of a run, hashed; says how far it is on a terminal."""
    from moetrace_collectors.ledger.chain import link
    from moetrace_collectors.ledger.reading import count_rows, ledger_rows_of

    total = count_rows(store, run_id)[0] if sys.stderr.isatty() else 0
    links: list[Link] = []
    for row in ledger_rows_of(store, run_id):
        links.append(link(row))
        if total >= PROGRESS_ROWS and len(links) % PROGRESS_ROWS == 0:
            print(f"\rrun {run_id}: {len(links)} of {total} rows", end="", file=sys.stderr, flush=True)
    if total >= PROGRESS_ROWS:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return links
