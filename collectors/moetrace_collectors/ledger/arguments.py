"""Where a run is, as command line arguments of the placement and doctor commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from moetrace_collectors.run_directory import newest_run_directory, open_run_directory

if TYPE_CHECKING:
    from moetrace_collectors.views.store_rows import ClientStore, HttpStore


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """--run, and --dir, --dsn or --url."""
    parser.add_argument(
        "--run", dest="run_id", metavar="RUN", help="which run (default: the one with the newest step)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--dir", type=Path, metavar="DIR", help="run directory (default: the newest)")
    where.add_argument("--dsn", metavar="DSN", help="store: chdb:///path, clickhouse://host or https://host")
    where.add_argument("--url", metavar="URL", help="a running collector, as in http://127.0.0.1:4318")
    parser.add_argument(
        "--database", default="moetrace", help="database of the tables (default: %(default)s)"
    )


def open_store(arguments: argparse.Namespace) -> ClientStore | HttpStore:
    """The store that the arguments name; the caller closes it.

    Raises:
        UsageError: there is none, or it cannot be opened.
    """
    # Here and not above: the extra of the store must not break the help.
    from moetrace_collectors.views.store_rows import HttpStore, store_of_directory, store_of_dsn

    if arguments.dsn is not None:
        return store_of_dsn(arguments.dsn, database=arguments.database)
    if arguments.url is not None:
        return HttpStore(arguments.url, database=arguments.database)
    directory = open_run_directory(arguments.dir) if arguments.dir is not None else newest_run_directory()
    return store_of_directory(directory, database=arguments.database)
