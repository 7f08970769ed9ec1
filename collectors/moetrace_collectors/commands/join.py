"""`moetrace join`: join and judge the steps that stateless collectors wrote to a store."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from moetrace_collectors import owner
from moetrace_collectors.errors import UsageError
from moetrace_collectors.number_format import count
from moetrace_collectors.run_directory import STORE_NAME
from moetrace_collectors.store import StoreAddress, embedded_dsn, open_client, parse_store

HELP = "judge the steps in a store that collect --join=store has filled"
INTERVAL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--dsn", help="store: clickhouse://host:port, https://host:port or chdb:///path")
    target.add_argument("--dir", type=Path, metavar="DIR", help="run directory with an embedded store")
    parser.add_argument("--database", default="moetrace", help="database of the tables (default: moetrace)")
    parser.add_argument("--run", dest="run_id", default="", metavar="ID", help="only this run (default: all)")
    parser.add_argument(
        "--join-timeout-s",
        type=float,
        default=10.0,
        help="wait for missing ranks at most so long, by the store's clock (default: 10)",
    )
    parser.add_argument(
        "--look-back-hours",
        type=float,
        default=24.0,
        help="look for rows that were written at most so long ago; 0 = all (default: 24)",
    )
    parser.add_argument("--once", action="store_true", help="judge what has closed, and end")


def run(arguments: argparse.Namespace) -> int:
    """Judge until a signal, or once; 0.

    Raises:
        UsageError: the store cannot be opened, is owned by a collector, or does not answer.
    """
    if arguments.join_timeout_s < 0 or arguments.look_back_hours < 0:
        raise UsageError("--join-timeout-s and --look-back-hours are 0 or more")
    address = parse_store(arguments.dsn or embedded_dsn(arguments.dir / STORE_NAME))
    if address.embedded_path is None:
        return _join(address, arguments)
    if not address.embedded_path.is_dir():
        # The engine would make an empty store there.
        raise UsageError(f"no store at {address.display}: give a run directory with --dir")
    ownership = owner.acquire(address.embedded_path.parent, address)
    try:
        return _join(address, arguments)
    finally:
        ownership.release()


def _join(address: StoreAddress, arguments: argparse.Namespace) -> int:
    from moetrace_collectors.store_join.store_joiner import JoinSettings, StoreJoiner, join_until

    client = open_client(address)
    stop = threading.Event()
    try:
        joiner = StoreJoiner(
            client,
            JoinSettings(
                database=arguments.database,
                timeout_s=arguments.join_timeout_s,
                look_back_hours=arguments.look_back_hours,
                run_id=arguments.run_id,
            ),
        )
        if arguments.once:
            print(f"judged {count(joiner.turn(), 'step')}")
            return 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        print(f"moetrace join: joining in {address.display}", file=sys.stderr, flush=True)
        join_until(joiner, stopped=stop.wait, interval_s=INTERVAL_S, on_turn=_say)
    finally:
        client.close()
    return 0


def _say(num_steps: int) -> None:
    if num_steps:
        print(f"moetrace join: judged {count(num_steps, 'step')}", file=sys.stderr, flush=True)
