"""Where a run is read from, as command line arguments: a run directory, a store, or a running collector."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetrace_collectors.run_directory import RunDirectory, newest_run_directory, open_run_directory

if TYPE_CHECKING:
    from moetrace_collectors.views.store_rows import ClientStore, HttpStore


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedStore:
    """What the arguments led to; the store is the caller's to close."""

    store: ClientStore | HttpStore
    directory: RunDirectory | None
    """None where a DSN or a URL was given."""
    address: str
    """For people."""


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """--dir, --dsn or --url, and --database."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--dir", type=Path, metavar="DIR", help="run directory (default: the newest of moetrace-runs/)"
    )
    source.add_argument(
        "--dsn", metavar="DSN", help="a store: chdb:///path, clickhouse://host or https://host"
    )
    source.add_argument("--url", metavar="URL", help="a running collector, as in http://127.0.0.1:4318")
    parser.add_argument(
        "--database", default="moetrace", help="database of the tables (default: %(default)s)"
    )


def open_store(arguments: argparse.Namespace) -> OpenedStore:
    """Open what the arguments name.

    Raises:
        UsageError: it cannot be opened.
    """
    # Here and not above: a missing extra must not break the other commands.
    from moetrace_collectors.views.store_rows import HttpStore, store_of_directory, store_of_dsn

    if arguments.dsn is not None:
        store = store_of_dsn(arguments.dsn, database=arguments.database)
        return OpenedStore(store=store, directory=None, address=store.address)
    if arguments.url is not None:
        store = HttpStore(arguments.url, database=arguments.database)
        return OpenedStore(store=store, directory=None, address=store.address)
    directory = open_run_directory(arguments.dir) if arguments.dir is not None else newest_run_directory()
    return OpenedStore(
        store=store_of_directory(directory, database=arguments.database),
        directory=directory,
        address=str(directory.store_path),
    )
