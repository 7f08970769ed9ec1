"""`moetrace collect`: the collector as a service in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from moetrace_collectors.config import JOINS, CollectorConfig, load_config
from moetrace_collectors.errors import UsageError
from moetrace_collectors.number_format import count
from moetrace_collectors.store import INSTALL

HELP = "receive steps from ranks, join and judge them, store and serve the result"
ALIVE_CHECK_S = 0.5
POOLS = ("moetrace-otlp", "moetrace-grpc", "moetrace-query", "asyncio_", "AnyIO worker")
"""Threads that work for clients: they end with what uses them, once they have nothing to do."""
IDLE_THREADS_S = 3.0
OWN_FILES = 512
"""Files and sockets beside HTTP connections: store, logs, gRPC."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    defaults = CollectorConfig()
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; see collector.example.toml")
    parser.add_argument(
        "--dir",
        dest="directory",
        type=Path,
        metavar="DIR",
        help=f"run directory, made if missing (default: {defaults.directory})",
    )
    parser.add_argument("--dsn", help="store: chdb:///path or clickhouse://host:port (default: DIR/store)")
    parser.add_argument("--database", help=f"database of the tables (default: {defaults.database})")
    parser.add_argument("--host", help=f"address to listen on (default: {defaults.host})")
    parser.add_argument(
        "--http-port", type=int, help=f"OTLP/HTTP, /metrics and SQL (default: {defaults.http_port}; 0 = any)"
    )
    parser.add_argument(
        "--grpc-port", type=int, help=f"OTLP/gRPC (default: {defaults.grpc_port}; 0 = any free port)"
    )
    parser.add_argument(
        "--no-grpc", dest="grpc", action="store_const", const=False, help="do not listen for OTLP/gRPC"
    )
    parser.add_argument(
        "--join",
        choices=JOINS,
        help="who joins steps: this collector, or the store, with moetrace join and any number of "
        f"collectors (default: {defaults.join})",
    )
    parser.add_argument(
        "--join-timeout-s",
        type=float,
        help=f"wait for missing ranks at most so long (default: {defaults.join_timeout_s:g})",
    )
    parser.add_argument(
        "--wal",
        choices=("on", "off"),
        help="write-ahead log: acknowledge only what is on disk (default: on; off: a kill loses data)",
    )
    parser.add_argument(
        "--insecure",
        action="store_const",
        const=True,
        help="listen beyond loopback without TLS or without tokens, on a network you trust",
    )
    parser.add_argument(
        "--tls-certificate", metavar="FILE", help="certificate and chain (PEM) for HTTP and gRPC"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
    parser.add_argument(
        "--tls-client-ca", metavar="FILE", help="every client must show a certificate of these authorities"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"tokens, one 'NAME SCOPES TOKEN' a line (more in ${defaults.token_variable})",
    )
    parser.add_argument(
        "--open-metrics",
        action="store_const",
        const=True,
        help="/metrics needs no token (it shows run ids, ranks and expert loads)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run until a signal; 0 when everything that was acknowledged is stored, else 1."""
    names = (
        "directory", "dsn", "database", "host", "http_port", "grpc_port", "grpc", "join",
        "join_timeout_s",
        "insecure", "tls_certificate", "tls_key", "tls_client_ca", "token_file", "open_metrics",
    )  # fmt: skip
    flags: dict[str, object] = {name: getattr(arguments, name) for name in names}
    flags["wal"] = None if arguments.wal is None else arguments.wal == "on"
    config = load_config(arguments.config, flags)
    logging.basicConfig(level=logging.WARNING, format="moetrace collect: %(levelname)s: %(message)s")
    # What it warns of, answers and counts say better.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    # The embedded engine takes its time zone from the process; the tables are in UTC.
    os.environ["TZ"] = "UTC"
    time.tzset()
    # gRPC's own log lines, as of a taken port, say less than ours and come first.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from moetrace_collectors.pipeline import Pipeline
    except ImportError as error:
        raise UsageError(f"collect needs {error.name}: {INSTALL}") from error
    _allow_open_files(config.max_connections + OWN_FILES)
    stop, reread = threading.Event(), threading.Event()
    pipeline = Pipeline(config)
    # Behind the store, whose engine installs handlers of its own. Further signals change nothing: the
    # last writes have a deadline.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGHUP, lambda *_: reread.set())
    try:
        pipeline.start()
        print(
            _ready(pipeline.note.http_address, pipeline.note.grpc_address, config),
            file=sys.stderr,
            flush=True,
        )
        while not stop.wait(ALIVE_CHECK_S):
            if not pipeline.is_alive():
                print("moetrace collect: the worker has ended; stopping", file=sys.stderr)
                break
            pipeline.refresh_access(force=reread.is_set())
            reread.clear()
        healthy = pipeline.is_alive()
    finally:
        pipeline.stop()
    if pipeline.num_lost_rows:
        print(
            f"moetrace collect: {count(pipeline.num_lost_rows, 'row')} given up: the store did not take them",
            file=sys.stderr,
        )
    if pipeline.is_log_behind:
        print(
            "moetrace collect: the store did not take everything in time; the rest is in the write-ahead log "
            f"and is written at the next start: moetrace collect --dir {config.directory}",
            file=sys.stderr,
        )
    if pipeline.is_stuck:
        print("moetrace collect: the store hangs in the middle of a write: left alone", file=sys.stderr)
    is_all_stored = pipeline.num_lost_rows == 0 and not pipeline.is_log_behind and not pipeline.is_stuck
    code = 0 if healthy and is_all_stored else 1
    _leave_busy_threads(code)
    return code


def _leave_busy_threads(code: int) -> None:
    """End the process at once where a thread of a pool is still at work.

    Python waits at its exit for every thread of every pool, and a query in the middle of one long function,
    or a disk that hangs, cannot be told to end. What can still be stored is stored by now.
    """
    deadline_s = time.monotonic() + IDLE_THREADS_S
    for thread in threading.enumerate():
        if thread.name.startswith(POOLS):
            thread.join(max(0.0, deadline_s - time.monotonic()))
    busy = [thread.name for thread in threading.enumerate() if thread.name.startswith(POOLS)]
    if not busy:
        return
    print(
        f"moetrace collect: cut off what did not end in time: {count(len(busy), 'thread')} at work for "
        "clients or the store",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _allow_open_files(wanted: int) -> None:
    """Raise this process's own limit, where it may, to what its bound on connections needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logging.getLogger(__name__).warning(
            "max_connections needs %d open files, this process may have %d: raise ulimit -n", wanted, allowed
        )


def _ready(http_address: str, grpc_address: str, config: CollectorConfig) -> str:
    grpc = f", OTLP/gRPC {grpc_address}" if grpc_address else ""
    return (
        f"moetrace collect: ready: OTLP/HTTP {http_address}/v1/traces{grpc}, metrics {http_address}/metrics, "
        f"SQL {http_address}/, page {http_address}/ui/, store {config.store.display}"
    )
