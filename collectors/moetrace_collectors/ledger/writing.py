"""Where a command writes ledger rows: a running collector, or a store that the command opens itself."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger.chain import LedgerRow

if TYPE_CHECKING:
    from moetrace_collectors.ledger.recorder import Recorder
    from moetrace_collectors.views.store_rows import ClientStore

WAIT_S = 10.0
"""How long a running collector may take until the row can be read."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Either the address of a running collector, or a store with the run directory that it lies in."""

    url: str | None = None
    dsn: str = ""
    directory: Path | None = None


def write_target(arguments: argparse.Namespace) -> Target:
    """What the store arguments name.

    Raises:
        UsageError: there is no such run directory.
    """
    from moetrace_collectors.run_directory import RunDirectory, newest_run_directory, open_run_directory
    from moetrace_collectors.store import parse_store

    if arguments.url is not None:
        return Target(url=arguments.url)
    if arguments.dsn is not None:
        path = parse_store(arguments.dsn).embedded_path
        if path is None:
            return Target(dsn=arguments.dsn)
        directory = RunDirectory(path=path.parent)
    else:
        directory = open_run_directory(arguments.dir) if arguments.dir is not None else newest_run_directory()
    live = directory.live_owner()
    if live is not None:
        return Target(url=live.http_address)
    return Target(dsn=directory.dsn, directory=directory.path)


@contextmanager
def open_recorder(target: Target, *, database: str) -> Iterator[tuple[Recorder, ClientStore]]:
    """A recorder into a store without a running collector, and the same store to read from.

    Raises:
        UsageError: it cannot be opened, or another process owns it.
    """
    from moetrace_collectors import owner
    from moetrace_collectors.ledger.client_store import ClientLedgerStore
    from moetrace_collectors.ledger.recorder import Recorder
    from moetrace_collectors.migrate import migrate
    from moetrace_collectors.store import open_client, parse_store
    from moetrace_collectors.store_errors import store_takes_migrations
    from moetrace_collectors.views.store_rows import ClientStore

    address = parse_store(target.dsn)
    if address.embedded_path is not None and not address.embedded_path.is_dir():
        raise UsageError(f"no store at {address.display}: give a run directory with --dir")
    ownership = None if target.directory is None else owner.acquire(target.directory, address)
    try:
        client = open_client(address)
        try:
            with store_takes_migrations(address.display):
                migrate(client, database=database)
            recorder = Recorder(
                ClientLedgerStore(client, database=database), unix_ms=lambda: time.time_ns() // 1_000_000
            )
            with ClientStore(target.dsn, database=database) as store:
                yield recorder, store
        finally:
            client.close()
    finally:
        if ownership is not None:
            ownership.release()


def wait_for_row(url: str, what: str, found: Callable[[], LedgerRow | None]) -> LedgerRow:
    """The row that a running collector writes of what it was sent.

    Raises:
        UsageError: it does not write it in time.
    """
    give_up = time.monotonic() + WAIT_S
    while (row := found()) is None:
        if time.monotonic() > give_up:
            raise UsageError(
                f"the collector at {url} took the {what} and has not written it after {WAIT_S:g} s: look at "
                "its log"
            )
        time.sleep(POLL_S)
    return row
