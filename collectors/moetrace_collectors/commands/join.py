"""`moetrace join`: join and judge the steps that stateless collectors wrote to a store."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from moetrace_collectors import owner
from moetrace_collectors.commands import join_endpoint
from moetrace_collectors.errors import UsageError
from moetrace_collectors.migrate import check_current
from moetrace_collectors.number_format import count
from moetrace_collectors.run_directory import STORE_NAME
from moetrace_collectors.store import StoreAddress, embedded_dsn, open_client, parse_store
from moetrace_collectors.store_clock import HOUR_MS
from moetrace_collectors.store_errors import store_answers

if TYPE_CHECKING:
    from moetrace_collectors.sinks.base import StepResult
    from moetrace_collectors.store_join.executions import ReuseNotice

HELP = "judge the steps in a store that collect --join=store has filled"
INTERVAL_S = 1.0
STOP_TIMEOUT_S = 30.0


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
    join_endpoint.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Judge until a signal, or once; 0.

    Raises:
        UsageError: the store cannot be opened, is owned by a collector, or does not answer at the start; or
            metrics cannot be served.
    """
    if arguments.join_timeout_s < 0 or arguments.look_back_hours < 0:
        raise UsageError("--join-timeout-s and --look-back-hours are 0 or more")
    if arguments.once and arguments.metrics_port is not None:
        raise UsageError("--metrics-port: nothing is served with --once")
    logging.basicConfig(level=logging.WARNING, format="moetrace join: %(levelname)s: %(message)s")
    address = parse_store(arguments.dsn or embedded_dsn(arguments.dir / STORE_NAME))
    with ExitStack() as undo:
        if address.embedded_path is not None:
            if not address.embedded_path.is_dir():
                # The engine would make an empty store there.
                raise UsageError(f"no store at {address.display}: give a run directory with --dir")
            undo.callback(owner.acquire(address.embedded_path.parent, address).release)
        return _join(address, arguments, undo)


def _join(address: StoreAddress, arguments: argparse.Namespace, undo: ExitStack) -> int:
    from moetrace_collectors.incarnations import AGAIN_REASON
    from moetrace_collectors.roll_ups.roll_up import RollUp, RollUpSettings
    from moetrace_collectors.roll_ups.thread import RollUpThread
    from moetrace_collectors.store_join.lease import JoinLease, StandIn, Turns
    from moetrace_collectors.store_join.store_joiner import JoinSettings, StoreJoiner
    from moetrace_collectors.store_join.turns import join_until

    endpoint = join_endpoint.open_endpoint(arguments, undo)
    # A store that is not there or not as it must be is said at once; one that goes away is waited for.
    client, of_roll_ups = open_client(address), open_client(address)
    undo.callback(client.close)
    undo.callback(of_roll_ups.close)
    with store_answers():
        check_current(client, database=arguments.database, store=address.display)
    roll_up = RollUp(
        of_roll_ups,
        RollUpSettings(
            database=arguments.database,
            run_id=arguments.run_id,
            look_back_ms=int(arguments.look_back_hours * HOUR_MS),
        ),
    )
    roll_ups = RollUpThread(roll_up)

    def written(results: Sequence[StepResult]) -> None:
        if endpoint is not None:
            endpoint.metrics.take(results)
        # Exchanges are rolled up when their verdicts come, however old their rank rows are.
        roll_ups.touch(
            (result.joined.run_id, min(one.start_unix_ns for one in result.joined.rank_steps))
            for result in results
        )

    def lost(table: str, num_rows: int, reason: str) -> None:
        if endpoint is not None:
            endpoint.metrics.own.rows_lost(table, num_rows)
        print(
            f"moetrace join: {count(num_rows, 'row')} of {table} given up: {reason}",
            file=sys.stderr,
            flush=True,
        )

    def reused(notice: ReuseNotice) -> None:
        if endpoint is not None and notice.reason == AGAIN_REASON:
            endpoint.metrics.own.reused_run_ids.add()

    def begin() -> StoreJoiner:
        return StoreJoiner(
            client,
            JoinSettings(
                database=arguments.database,
                timeout_s=arguments.join_timeout_s,
                look_back_hours=arguments.look_back_hours,
                run_id=arguments.run_id,
            ),
            on_written=written,
            # As with verdicts: their rows may have been stamped long before they came.
            on_grown=roll_ups.touch,
            on_lost=lost,
            on_reused=reused,
            book=None if endpoint is None else endpoint.metrics.book,
        )

    joiner: Turns
    if address.embedded_path is not None:
        joiner = begin()  # nobody else can open the store
    else:
        of_lease = open_client(address)
        undo.callback(of_lease.close)
        lease = JoinLease(
            of_lease, database=arguments.database, run_id=arguments.run_id, clock_s=time.monotonic
        )
        undo.callback(lease.leave)
        joiner = StandIn(
            lease, begin, on_standing_by=lambda is_shown: _standing_by(address, arguments.once, is_shown)
        )
    if arguments.once:
        print(f"judged {count(joiner.turn(), 'step')}")
        with store_answers():
            roll_up.turn(touched=roll_ups.take_touched(), everything=True)
        return 0
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    print(f"moetrace join: joining in {address.display}", file=sys.stderr, flush=True)
    if endpoint is not None:
        endpoint.start()
        print(f"moetrace join: metrics {endpoint.url}", file=sys.stderr, flush=True)
    roll_ups.start()
    try:
        join_until(
            joiner,
            stopped=stop.wait,
            interval_s=INTERVAL_S,
            on_turn=lambda num_steps: _turned(num_steps, endpoint),
            on_failed=lambda error: _failed(error, endpoint),
            go_on=lambda: not stop.is_set(),
        )
    finally:
        roll_ups.stop(timeout_s=STOP_TIMEOUT_S)
    return 0


def _standing_by(address: StoreAddress, once: bool, is_shown: bool) -> None:
    if not is_shown:
        if once:
            raise UsageError(
                f"{address.display} does not show yet that this moetrace join has begun, as a replica that "
                "lags does, so another one may be at work: run it again"
            )
        return  # it asks again in a second
    who = f"another moetrace join is at work in {address.display}"
    if once:
        raise UsageError(f"{who}: leave the steps to it, or stop it; one that was killed counts for a minute")
    print(f"moetrace join: {who}; standing by", file=sys.stderr, flush=True)


def _turned(num_steps: int, endpoint: join_endpoint.Endpoint | None) -> None:
    if endpoint is not None:
        endpoint.metrics.store_answers(True)
        endpoint.refresh()
    _say(num_steps)


def _failed(error: UsageError, endpoint: join_endpoint.Endpoint | None) -> None:
    if endpoint is not None:
        endpoint.metrics.store_answers(False)
        # Who may ask changes also while the store is away.
        endpoint.refresh()
    print(f"moetrace join: {error}; trying again", file=sys.stderr, flush=True)


def _say(num_steps: int) -> None:
    if num_steps:
        print(f"moetrace join: judged {count(num_steps, 'step')}", file=sys.stderr, flush=True)
