"""Wires the stages: receivers -> decode -> intake -> worker (join, verdict, sinks). Knows them all.

::

    OTLP/HTTP --+                          worker thread
    OTLP/gRPC --+-> decode -> intake (bounded) -> joiner -> verdict, loads -> sinks: ClickHouse, Prometheus
                       |        |    ^
                       |   write-ahead log: durable before the answer; a backlog waits there
                       |        |
                       |        full: 429 / RESOURCE_EXHAUSTED; disk refuses: 503 / UNAVAILABLE
                       +-> rejections, in the answer as partial success, and to the dead letter
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from contextlib import ExitStack
from typing import Any

from moetrace_collectors import owner
from moetrace_collectors.access.scopes import RouteScopes
from moetrace_collectors.access.server_access import ServerAccess
from moetrace_collectors.config import CollectorConfig
from moetrace_collectors.dead_letter import DeadLetter
from moetrace_collectors.events import EventKind
from moetrace_collectors.intake import Intake
from moetrace_collectors.joiner import Joiner, JoinWindow
from moetrace_collectors.journal import Journal, open_journal
from moetrace_collectors.ledger.epochs import Epochs
from moetrace_collectors.migrate import migrate
from moetrace_collectors.model import PlacementReport
from moetrace_collectors.page.routes import Page
from moetrace_collectors.read_only_query import (
    EmbeddedQueryRunner,
    QueryLimits,
    QueryRunner,
    ServerQueryRunner,
)
from moetrace_collectors.receivers.http_server import HttpServer
from moetrace_collectors.receivers.otlp_grpc import OtlpGrpcReceiver
from moetrace_collectors.receivers.otlp_http import PATH as OTLP_PATH
from moetrace_collectors.receivers.otlp_http import SCOPES as OTLP_SCOPES
from moetrace_collectors.receivers.otlp_http import OtlpHttpReceiver
from moetrace_collectors.receivers.pages import SCOPES as PAGE_SCOPES
from moetrace_collectors.receivers.pages import Pages
from moetrace_collectors.refusals import DiskRefusals
from moetrace_collectors.request_handler import RequestHandler
from moetrace_collectors.roll_ups.roll_up import RollUp, RollUpSettings
from moetrace_collectors.roll_ups.thread import RollUpThread
from moetrace_collectors.run_directory import RunDirectory
from moetrace_collectors.self_metrics import SelfMetrics, WalMetrics, make_registry
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks.background import BackgroundSink
from moetrace_collectors.sinks.base import RetryPolicy
from moetrace_collectors.sinks.clickhouse import ClickHouseSink
from moetrace_collectors.sinks.embedded_insert import EMBEDDED_SETTINGS, EmbeddedInsert
from moetrace_collectors.sinks.placement_ledger import LedgerSink
from moetrace_collectors.sinks.prometheus import PrometheusSink
from moetrace_collectors.stateless_joiner import StatelessJoiner
from moetrace_collectors.store import open_client
from moetrace_collectors.store_errors import store_takes_migrations
from moetrace_collectors.summary import layer_loads
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_collectors.wal.recovery import recover
from moetrace_collectors.worker import Clocks, Worker

NS_PER_S = 1e9
NS_PER_MS = 1_000_000
GRPC_GRACE_S = 5.0
EMBEDDED_WRITERS = 2
"""Most of an insert is sorting and compressing by one thread of the engine."""

logger = logging.getLogger(__name__)


class Pipeline:
    """A collector: opened when made, running between `start` and `stop`."""

    def __init__(self, config: CollectorConfig) -> None:
        """Own the directory, bind the ports, open and migrate the store; nothing is received yet.

        Raises:
            UsageError: the directory, a port or the store cannot be had.
        """
        with ExitStack() as undo:
            self._open(config, undo)
            self._resources = undo.pop_all()

    def _open(self, config: CollectorConfig, undo: ExitStack) -> None:
        self._ownership = owner.acquire(config.directory, config.store)
        undo.callback(self._ownership.release)
        clocks = Clocks(monotonic_ns=time.monotonic_ns, unix_ns=time.time_ns, sleep=time.sleep)
        book = SeriesBook()
        turn = threading.Lock()
        self._metrics = metrics = SelfMetrics(book)
        self._num_lost_rows = 0
        self._lost_rows_lock = threading.Lock()
        journal = _journal(config, clocks, undo) if config.wal else None
        if journal is None:
            _warn_of_a_log_left_behind(config)
        self._intake = Intake(
            max_requests=config.queue_requests,
            max_bytes=config.queue_bytes,
            clock_ns=clocks.monotonic_ns,
            num_replayed=journal.recovery.num_requests if journal is not None else 0,
            read_log=journal.read if journal is not None else None,
        )
        self._access = access = ServerAccess(config, clock_ns=clocks.monotonic_ns, on_refused=metrics.refused)
        disk = None if journal is None else DiskRefusals(journal.directory, clock_ns=clocks.monotonic_ns)
        handler = RequestHandler(
            intake=self._intake,
            metrics=metrics,
            max_world_size=config.max_world_size,
            journal=journal,
            turn=turn,
            disk=disk,
        )
        # Ports before the store: a taken port is known at once, an embedded store takes a second to open.
        self._grpc = (
            OtlpGrpcReceiver(
                handler,
                host=config.host,
                port=config.grpc_port,
                max_message_bytes=config.max_decompressed_bytes,
                on_unread=metrics.unread_calls.add,
                max_spans=config.max_spans_per_request,
                control=access.control,
                tls=access.tls,
            )
            if config.grpc
            else None
        )
        if self._grpc is not None:
            undo.callback(self._grpc.stop, grace_s=0.0)
        self._http = HttpServer(
            host=config.host, port=config.http_port, tls=access.tls, max_connections=config.max_connections
        )
        undo.callback(self._http.stop)
        client = open_client(config.store)
        undo.callback(client.close)
        with store_takes_migrations(config.store.display):
            migrate(client, database=config.database)
        registry = make_registry(book, self._intake.snapshot)
        self._queries = queries = _query_runner(config, undo)
        if journal is not None:
            registry.register(
                WalMetrics(num_bytes=lambda: journal.num_bytes, num_syncs=lambda: journal.num_syncs)
            )
        pages = Pages(
            registry=registry,
            queries=queries,
            is_healthy=self.is_alive,
            trouble=lambda: disk.trouble if disk is not None else "",
            on_query_failed=metrics.query_failed,
            reload=lambda: self.refresh_access(force=True),
        )
        otlp = OtlpHttpReceiver(
            handler,
            max_body_bytes=config.max_body_bytes,
            max_decompressed_bytes=config.max_decompressed_bytes,
            max_spans=config.max_spans_per_request,
        )
        undo.callback(otlp.close)
        self._routes = [*pages.routes(), *Page(queries, database=config.database).routes()]
        self._direct = {OTLP_PATH: otlp}
        self._scopes: RouteScopes = {
            **OTLP_SCOPES,
            **PAGE_SCOPES,
            **({"/metrics": None} if config.open_metrics else {}),
        }
        dead_letter = DeadLetter(
            RunDirectory(path=config.directory).dead_letter_path, max_bytes=config.dead_letter_bytes
        )
        undo.callback(dead_letter.close)
        self._roll_ups = _roll_ups(config, metrics, undo)
        writers = [
            ClickHouseSink(
                writer_client,
                database=config.database,
                batch_bytes=config.batch_bytes,
                on_stored=metrics.rows_stored,
                on_lost=self._rows_lost,
                # Rows that waited long for the store are stamped before the time that is looked back.
                on_written=self._roll_ups.touch if self._roll_ups is not None else None,
                insert_arrow=_embedded_insert(config, undo),
            )
            for writer_client in (client, *_more_writer_clients(config, undo))
        ]
        # Of its own: calls on one client wait for each other, and a batch of rows takes long.
        ledger_client = open_client(config.store)
        undo.callback(ledger_client.close)
        ledger = LedgerSink(
            ledger_client,
            database=config.database,
            book=book,
            unix_ms=lambda: clocks.unix_ns() // NS_PER_MS,
            on_conflict=_warn_of_conflict,
            on_lost=self._rows_lost,
        )
        self._note = owner.OwnerNote(
            pid=os.getpid(),
            http_address=access.url(self._http.port),
            grpc_address=access.address(self._grpc.port) if self._grpc is not None else "",
            store_dsn=config.store.display,
            database=config.database,
        )
        joiner = _joiner(config)
        self._worker = Worker(
            intake=self._intake,
            joiner=joiner,
            judge=VerdictEngine(),
            layer_loads=layer_loads,
            # Prometheus first: it cannot fail, and a store that is away must not delay it.
            # The ledger before the steps: a reader who sees an epoch's steps finds the epoch.
            sinks=(PrometheusSink(book, series_budget=config.series_budget), ledger),
            background_sinks=(
                BackgroundSink(
                    writers,
                    batch_bytes=config.batch_bytes,
                    batch_interval_ns=int(config.batch_interval_s * NS_PER_S),
                    clock_ns=clocks.monotonic_ns,
                ),
            ),
            placements=ledger.take_placement,
            epochs=Epochs(ledger.mapping, clock_ns=clocks.monotonic_ns),
            dead_letter=dead_letter,
            metrics=metrics,
            clocks=clocks,
            retry=RetryPolicy(),
            shutdown_timeout_s=config.shutdown_timeout_s,
            on_runs=self._ownership.note_runs,
            log=journal,
            turn=turn,
        )
        if journal is not None:
            restore(journal, joiner, self._worker, metrics)
        self._shutdown_timeout_s = config.shutdown_timeout_s

    @property
    def note(self) -> owner.OwnerNote:
        """Addresses that are bound, and the store."""
        return self._note

    @property
    def num_lost_rows(self) -> int:
        """Rows that were given up so far."""
        return self._num_lost_rows

    @property
    def is_stuck(self) -> bool:
        """Whether it stopped in the middle of a write that does not end: the store hangs."""
        return self._worker.is_stuck

    @property
    def has_queries(self) -> bool:
        """Whether readers' queries still run in it, which nothing could end."""
        return bool(self._queries.num_running)

    @property
    def is_log_behind(self) -> bool:
        """Whether it stopped with requests in the write-ahead log that are not stored yet."""
        return self._worker.is_log_behind

    def start(self) -> None:
        """Receive; returns once requests are answered and collector.json says where."""
        self._worker.start()
        if self._roll_ups is not None:
            self._roll_ups.start()
        if self._grpc is not None:
            self._grpc.start()
        self._http.start(self._routes, direct=self._direct, control=self._access.control, scopes=self._scopes)
        self._ownership.write_note(self._note)

    def refresh_access(self, *, force: bool = False) -> None:
        """Read tokens and certificate again where their files have changed; cheap, to be called often."""
        self._access.refresh(force=force)

    def is_alive(self) -> bool:
        """Whether the worker runs; without it nothing that is received would be stored."""
        return self._worker.is_alive()

    def stop(self) -> None:
        """Stop receiving, join and store what was acknowledged, give everything back."""
        with ExitStack() as give_back:
            give_back.callback(self._give_back)
            if self._grpc is not None:
                self._grpc.stop(grace_s=GRPC_GRACE_S)
            self._http.stop(interrupt=self._queries.cancel)
            self._worker.stop()
            if self._roll_ups is not None:
                # Behind the last rows; where the store did not take those, it does not take roll-ups either.
                is_store_away = self.is_log_behind or self.is_stuck
                self._roll_ups.stop(timeout_s=0 if is_store_away else self._shutdown_timeout_s)

    def _give_back(self) -> None:
        if not self.is_stuck:
            # Also those that no request waits for any more.
            self._queries.cancel()
        if self.is_stuck or self.has_queries:
            # To close a connection waits for what runs on it; the end of the process does not.
            self._ownership.release()
        else:
            self._resources.close()

    def _rows_lost(self, table: str, num_rows: int) -> None:
        self._metrics.rows_lost(table, num_rows)
        with self._lost_rows_lock:
            self._num_lost_rows += num_rows


def _roll_ups(config: CollectorConfig, metrics: SelfMetrics, undo: ExitStack) -> RollUpThread | None:
    if config.join == "store":
        return None  # moetrace join does it, once for all collectors
    client = open_client(config.store)
    undo.callback(client.close)
    roll_up = RollUp(client, RollUpSettings(database=config.database))
    return RollUpThread(roll_up, on_failed=lambda: metrics.sink_failed("roll_ups"))


def _joiner(config: CollectorConfig) -> Joiner | StatelessJoiner:
    if config.join == "store":
        return StatelessJoiner()
    return Joiner(
        JoinWindow(
            timeout_ns=int(config.join_timeout_s * NS_PER_S),
            max_steps=config.max_pending_steps,
            max_bytes=config.max_pending_bytes,
            max_closed_steps=config.max_closed_steps,
            watermark_steps=config.join_watermark_steps,
            quorum=config.join_quorum,
            quorum_grace_ns=int(config.join_quorum_grace_s * NS_PER_S),
        )
    )


def _journal(config: CollectorConfig, clocks: Clocks, undo: ExitStack) -> Journal:
    journal = open_journal(
        RunDirectory(path=config.directory).wal_path,
        epoch=secrets.randbits(63),
        now_ns=clocks.monotonic_ns(),
        max_bytes=config.wal_max_bytes,
        segment_bytes=config.wal_segment_bytes,
        max_world_size=config.max_world_size,
        max_decompressed_bytes=config.max_decompressed_bytes,
    )
    undo.callback(journal.close)
    return journal


def _warn_of_a_log_left_behind(config: CollectorConfig) -> None:
    path = RunDirectory(path=config.directory).wal_path
    if path.is_dir() and (recovery := recover(path, now_ns=0)).num_requests:
        logger.warning(
            "%s holds %d requests that may not be stored, and is left alone with wal off: "
            "start once with --wal on to store them",
            path,
            recovery.num_requests,
        )


def restore(journal: Journal, joiner: Joiner | StatelessJoiner, worker: Worker, metrics: SelfMetrics) -> None:
    """Give the joiner its memory back, and say in log, metrics and events what the log held."""
    recovery = journal.recovery
    for closed in recovery.closed:
        try:
            joiner.remember(closed)
        except ValueError as error:
            logger.warning("write-ahead log: %s; steps that are stored may be judged again", error)
    metrics.wal_replayed.add(recovery.num_requests)
    metrics.wal_damaged_bytes.add(recovery.num_damaged_bytes)
    if recovery.num_requests:
        worker.note(EventKind.REPLAYED, detail=f"{recovery.num_requests} requests in the write-ahead log")
    if recovery.num_damaged_bytes:
        detail = (
            f"write-ahead log: {recovery.num_damaged_bytes} bytes at {recovery.num_damaged_places} places do "
            f"not read and are passed over, {recovery.num_requests} requests do ({recovery.detail})"
        )
        logger.warning("%s", detail)
        worker.note(EventKind.WAL_DAMAGED, reason="unreadable", detail=detail)


def _warn_of_conflict(report: PlacementReport) -> None:
    logger.warning(
        "run %s announces another mapping under placement version %d, which has one: give every mapping a "
        "version of its own; the ledger keeps the first",
        report.run_id,
        report.version,
    )


def _more_writer_clients(config: CollectorConfig, undo: ExitStack) -> list[Any]:
    # A server has its own threads, and one writer keeps it busy.
    number = 0 if config.store.embedded_path is None else EMBEDDED_WRITERS - 1
    clients = [open_client(config.store) for _ in range(number)]
    for client in clients:
        undo.callback(client.close)
    return clients


def _embedded_insert(config: CollectorConfig, undo: ExitStack) -> EmbeddedInsert | None:
    if config.store.embedded_path is None:
        return None
    insert = EmbeddedInsert(config.store.embedded_path, database=config.database, settings=EMBEDDED_SETTINGS)
    undo.callback(insert.close)
    return insert


def _query_runner(config: CollectorConfig, undo: ExitStack) -> QueryRunner:
    limits = QueryLimits(
        timeout_s=config.query_timeout_s,
        max_memory_bytes=config.query_max_memory_bytes,
        max_result_rows=config.query_max_result_rows,
        max_result_bytes=config.query_max_result_bytes,
        max_concurrent=config.query_max_concurrent,
    )
    if config.store.embedded_path is not None:
        return EmbeddedQueryRunner(config.store, database=config.database, limits=limits)
    client = open_client(config.store)
    undo.callback(client.close)
    return ServerQueryRunner(client, database=config.database, limits=limits)
