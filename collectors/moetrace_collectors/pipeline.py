"""Wires the stages: receivers -> decode -> intake -> worker (join, verdict, sinks). Knows them all.

::

    OTLP/HTTP --+                          worker thread
    OTLP/gRPC --+-> decode -> intake (bounded) -> joiner -> verdict, loads -> sinks: ClickHouse, Prometheus
                       |         |
                       |         full: 429 / RESOURCE_EXHAUSTED, the sender tries again
                       +-> rejections, in the answer as partial success, and to the dead letter
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from moetrace_collectors import owner
from moetrace_collectors.config import CollectorConfig
from moetrace_collectors.dead_letter import DeadLetter
from moetrace_collectors.decode import Decoded, decode
from moetrace_collectors.events import MAX_PAYLOAD_BYTES, Rejection
from moetrace_collectors.intake import Intake
from moetrace_collectors.joiner import Joiner, JoinWindow, size_bytes
from moetrace_collectors.migrate import migrate
from moetrace_collectors.read_only_query import (
    EmbeddedQueryRunner,
    QueryLimits,
    QueryRunner,
    ServerQueryRunner,
)
from moetrace_collectors.receivers.handler import Accepted, OverloadedError
from moetrace_collectors.receivers.http_server import HttpServer
from moetrace_collectors.receivers.otlp_grpc import OtlpGrpcReceiver
from moetrace_collectors.receivers.otlp_http import OtlpHttpReceiver
from moetrace_collectors.receivers.pages import Pages
from moetrace_collectors.run_directory import RunDirectory
from moetrace_collectors.self_metrics import SelfMetrics, make_registry
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks.base import RetryPolicy
from moetrace_collectors.sinks.clickhouse import ClickHouseSink
from moetrace_collectors.sinks.prometheus import PrometheusSink
from moetrace_collectors.stateless_joiner import StatelessJoiner
from moetrace_collectors.store import open_client
from moetrace_collectors.summary import layer_loads
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_collectors.worker import Clocks, Worker
from moetrace_schemas.enums import RejectReason

NS_PER_S = 1e9
RETRY_AFTER_S = 1
GRPC_GRACE_S = 5.0

logger = logging.getLogger(__name__)


class RequestHandler:
    """Decodes a request and offers it to the intake; behind both receivers, in their threads."""

    def __init__(self, *, intake: Intake, metrics: SelfMetrics, max_world_size: int) -> None:
        self._intake = intake
        self._metrics = metrics
        self._max_world_size = max_world_size

    def take(self, request: ExportTraceServiceRequest) -> Accepted:
        """See TraceHandler."""
        decoded = self._decode(request)
        size = sum(size_bytes(step) for step in decoded.rank_steps)
        size += sum(len(rejection.payload) for rejection in decoded.rejected)
        if not self._intake.offer(decoded.rank_steps, decoded.rejected, size_bytes=size):
            self._metrics.throttled.add()
            raise OverloadedError("the collector's queue is full", retry_after_s=RETRY_AFTER_S)
        self._metrics.foreign_spans.add(decoded.num_foreign_spans)
        if not decoded.rejected:
            return Accepted(rejected_spans=0, message="")
        first = decoded.rejected[0]
        return Accepted(
            rejected_spans=len(decoded.rejected), message=f"first: {first.reason.value}: {first.detail}"
        )

    def refuse(self, reason: RejectReason, detail: str, payload: bytes) -> None:
        """See TraceHandler."""
        rejection = Rejection(reason=reason, detail=detail, payload=payload[:MAX_PAYLOAD_BYTES])
        self._intake.offer((), (rejection,), size_bytes=len(rejection.payload))

    def _decode(self, request: ExportTraceServiceRequest) -> Decoded:
        try:
            return decode(request, max_world_size=self._max_world_size)
        except Exception as error:
            # The per-message boundary: whatever a request holds, its sender gets an answer.
            logger.exception("a request could not be decoded")
            rejection = Rejection(
                reason=RejectReason.MALFORMED_REQUEST,
                detail=f"the decoder failed with {type(error).__name__}",
                payload=request.SerializeToString()[:MAX_PAYLOAD_BYTES],
            )
            return Decoded(rank_steps=(), rejected=(rejection,), num_foreign_spans=0)


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
        self._metrics = metrics = SelfMetrics(book)
        self._num_lost_rows = 0
        self._intake = Intake(
            max_requests=config.queue_requests,
            max_bytes=config.queue_bytes,
            clock_ns=clocks.monotonic_ns,
        )
        handler = RequestHandler(intake=self._intake, metrics=metrics, max_world_size=config.max_world_size)
        # Ports before the store: a taken port is known at once, an embedded store takes a second to open.
        self._grpc = (
            OtlpGrpcReceiver(
                handler,
                host=config.host,
                port=config.grpc_port,
                max_message_bytes=config.max_decompressed_bytes,
            )
            if config.grpc
            else None
        )
        if self._grpc is not None:
            undo.callback(self._grpc.stop, grace_s=0.0)
        self._http = HttpServer(host=config.host, port=config.http_port)
        undo.callback(self._http.stop)
        client = open_client(config.store)
        undo.callback(client.close)
        migrate(client, database=config.database)
        registry = make_registry(book, self._intake.snapshot)
        pages = Pages(registry=registry, queries=_query_runner(config, undo), is_healthy=self.is_alive)
        otlp = OtlpHttpReceiver(
            handler,
            max_body_bytes=config.max_body_bytes,
            max_decompressed_bytes=config.max_decompressed_bytes,
        )
        self._routes = [otlp.route(), *pages.routes()]
        dead_letter = DeadLetter(
            RunDirectory(path=config.directory).dead_letter_path, max_bytes=config.dead_letter_bytes
        )
        undo.callback(dead_letter.close)
        self._clickhouse = ClickHouseSink(
            client,
            database=config.database,
            batch_bytes=config.batch_bytes,
            batch_interval_ns=int(config.batch_interval_s * NS_PER_S),
            clock_ns=clocks.monotonic_ns,
            on_stored=metrics.rows_stored,
            on_lost=self._rows_lost,
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        self._note = owner.OwnerNote(
            pid=os.getpid(),
            http_address=f"http://{host}:{self._http.port}",
            grpc_address=f"{host}:{self._grpc.port}" if self._grpc is not None else "",
            store_dsn=config.store.display,
            database=config.database,
        )
        self._worker = Worker(
            intake=self._intake,
            joiner=_joiner(config),
            judge=VerdictEngine(),
            layer_loads=layer_loads,
            # Prometheus first: it cannot fail, and a store that is away must not delay it.
            sinks=(PrometheusSink(book, series_budget=config.series_budget), self._clickhouse),
            dead_letter=dead_letter,
            metrics=metrics,
            clocks=clocks,
            retry=RetryPolicy(),
            shutdown_timeout_s=config.shutdown_timeout_s,
            on_runs=self._note_runs,
        )

    @property
    def note(self) -> owner.OwnerNote:
        """Addresses that are bound, and the store."""
        return self._note

    @property
    def num_lost_rows(self) -> int:
        """Rows that were given up so far."""
        return self._num_lost_rows

    def start(self) -> None:
        """Receive; returns once requests are answered and collector.json says where."""
        self._worker.start()
        if self._grpc is not None:
            self._grpc.start()
        self._http.start(self._routes)
        self._ownership.write_note(self._note)

    def is_alive(self) -> bool:
        """Whether the worker runs; without it nothing that is received would be stored."""
        return self._worker.is_alive()

    def stop(self) -> None:
        """Stop receiving, join and store what was acknowledged, give everything back."""
        with self._resources:
            if self._grpc is not None:
                self._grpc.stop(grace_s=GRPC_GRACE_S)
            self._http.stop()
            self._worker.stop()

    def _note_runs(self, run_ids: Sequence[str]) -> None:
        self._note = self._note.with_runs(run_ids)
        self._ownership.write_note(self._note)

    def _rows_lost(self, table: str, num_rows: int) -> None:
        self._metrics.rows_lost(table, num_rows)
        self._num_lost_rows += num_rows


def _joiner(config: CollectorConfig) -> Joiner | StatelessJoiner:
    if config.join == "store":
        return StatelessJoiner()
    return Joiner(
        JoinWindow(
            timeout_ns=int(config.join_timeout_s * NS_PER_S),
            max_steps=config.max_pending_steps,
            max_bytes=config.max_pending_bytes,
            max_closed_steps=config.max_closed_steps,
        )
    )


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
