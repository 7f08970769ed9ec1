"""HTTP: whole requests through the gate to the routes, without a socket; and SQL in the real engine."""

from __future__ import annotations

import asyncio
import atexit
import re
from collections import Counter
from typing import Any
from urllib.parse import unquote

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message

from fuzz.scratch import scratch_folder
from fuzz.text_targets import SQL
from moetrace_collectors.access.control import AccessControl
from moetrace_collectors.access.gate import AccessGate
from moetrace_collectors.access.rate_limit import RateLimiter
from moetrace_collectors.access.tokens import TokenBook
from moetrace_collectors.intake import Intake
from moetrace_collectors.read_only_query import (
    EmbeddedQueryRunner,
    Query,
    QueryError,
    QueryLimits,
    check_name_and_guard,
)
from moetrace_collectors.receivers import otlp_http, pages
from moetrace_collectors.request_handler import RequestHandler
from moetrace_collectors.self_metrics import SelfMetrics
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.store import embedded_dsn, open_client, parse_store
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas.enums import QueryFailure, RefuseReason

READ, INGEST = "r" * 32, "i" * 32
LIMITS = QueryLimits(timeout_s=1.0, max_memory_bytes=2**28, max_result_rows=1_000, max_result_bytes=2**20)


_TARGET, _METHOD = re.compile(rb"[\x21-\x7e]+"), re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
"""What h11 lets through."""


class _Checked:
    """Everything that happens to a query before the engine sees it."""

    def run(self, query: Query) -> bytes:
        """Check, and return nothing."""
        check_name_and_guard(query, query.database or "moetrace")
        LIMITS.settings(query.settings)
        return b""


class HttpTarget:
    """A request: method, path with query, header lines, a blank line, body.

    Every answer of 4xx is counted by reason, and nothing is answered 500.
    """

    name = "http request"
    documents: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.refused: Counter[RefuseReason] = Counter()
        self.failed: Counter[QueryFailure] = Counter()
        self._intake = Intake(max_requests=100, max_bytes=2**24, clock_ns=lambda: 0)
        handler = RequestHandler(intake=self._intake, metrics=SelfMetrics(SeriesBook()), max_world_size=64)
        views = pages.Pages(
            registry=CollectorRegistry(),
            queries=_Checked(),
            is_healthy=lambda: True,
            on_query_failed=lambda reason: self.failed.update([reason]),
            reload=lambda: None,
        )
        self._loop = asyncio.new_event_loop()
        atexit.register(self._loop.close)
        otlp = otlp_http.OtlpHttpReceiver(handler, max_body_bytes=100_000, max_decompressed_bytes=200_000)
        app = Starlette(routes=[Route(otlp_http.PATH, otlp), *views.routes()])
        app.router.redirect_slashes = False
        self._app = AccessGate(
            app,
            control=AccessControl(
                tokens=TokenBook(file=None, environment=f"a ingest {INGEST};b read {READ}"),
                limiter=RateLimiter(per_second=0.0, burst=1, clock_ns=lambda: 0),
                on_refused=lambda reason: self.refused.update([reason]),
            ),
            scopes={**otlp_http.SCOPES, **pages.SCOPES},
            loopback_only=True,
        )
        read, ingest = f"authorization: Bearer {READ}", f"authorization: Bearer {INGEST}"
        body = request(SyntheticRun(world_size=1, num_layers=1).step(0)).SerializeToString()
        self.seeds = [
            f"GET /?query=SELECT%201&default_format=JSON&database=moetrace&param_a=1\n{read}\n\n".encode(),
            f"POST /?max_result_rows=10&param_b=%27&compress=0&readonly=1\n{read}\n\nSELECT 1".encode(),
            f"POST /?output_format_json_quote_64bit_integers=0&session_id=x\n{read}\n\n".encode() + SQL[1],
            f"POST /v1/traces\n{ingest}\ncontent-type: application/x-protobuf\n\n".encode() + body,
            f"POST /v1/traces\n{ingest}\ncontent-type: application/json\n\n{{}}".encode(),
            f"POST /v1/traces\n{ingest}\ncontent-encoding: gzip\ncontent-length: 9\n\n\x1f".encode(),
            b"GET /metrics\nauthorization: Basic cmVhZDpycnJycnJycnJycnJycnJycnJycnJycnJycnJycg==\n\n",
            b"GET /healthz\nhost: localhost:4318\n\n",
            f"POST /-/reload\n{read}\nsec-fetch-site: cross-site\n\n".encode(),
        ]

    def run(self, data: bytes) -> str:
        """One request; the status."""
        head, _, body = data.partition(b"\n\n")
        first, *lines = head.split(b"\n")
        method, _, target = first.partition(b" ")
        if _TARGET.fullmatch(target) is None or _METHOD.fullmatch(method) is None:
            # So far it does not come: h11 answers 400.
            return "not http"
        path, _, query = target.partition(b"?")
        headers = []
        for line in lines[:50]:
            name, _, value = line.partition(b":")
            headers.append((name.strip().lower(), value.strip()))
        scope = {
            "type": "http",
            "method": method.decode("latin-1"),
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 4318),
            "scheme": "http",
            "root_path": "",
            "http_version": "1.1",
        }
        before = self._counted()
        status = self._loop.run_until_complete(self._ask(scope, body))
        counted = self._counted() - before
        while self._intake.take(timeout_s=0.0) is not None:
            pass
        if status >= 500 and status != 503:
            raise AssertionError(f"answered {status}")
        # 404 and 405 of the router are the client's own mistakes: nothing was turned away.
        if status in (400, 401, 403, 413, 415, 421, 429) and counted != 1:
            raise AssertionError(f"answered {status}, counted {counted} times")
        return str(status)

    def _counted(self) -> int:
        rejected = sum(self._intake.snapshot().rejected.values())
        return self.refused.total() + self.failed.total() + rejected

    async def _ask(self, scope: dict[str, Any], body: bytes) -> int:
        statuses: list[int] = []
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await self._app(scope, receive, send)
        (status,) = statuses
        return status


class SqlTarget:
    """SQL in the real embedded engine, with the limits; what the guard lets pass must only read."""

    name = "sql in the engine"
    seeds = SQL
    documents: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self._runner: EmbeddedQueryRunner | None = None

    def _open(self) -> EmbeddedQueryRunner:
        # Not before the first input: one process opens one engine.
        address = parse_store(embedded_dsn(scratch_folder() / "store"))
        self._client = open_client(address)
        self._client.command("CREATE DATABASE moetrace")
        self._client.command(
            "CREATE TABLE moetrace.step_verdicts (step UInt64) ENGINE = MergeTree ORDER BY step"
        )
        return EmbeddedQueryRunner(address, database="moetrace", limits=LIMITS)

    def run(self, data: bytes) -> str:
        """One statement."""
        self._runner = self._runner or self._open()
        sql, _, value = data.decode("utf-8", "replace").partition("\x01")
        try:
            self._runner.run(
                Query(sql=sql, format="TabSeparated", database="", parameters={"a": value}, settings={})
            )
        except QueryError as error:
            return f"refused: {error.status}"
        if self._tables() != ["step_verdicts"]:
            raise AssertionError(f"the statement changed the store: {self._tables()}")
        return "ok"

    def _tables(self) -> list[str]:
        found = self._client.query("SELECT name FROM system.tables WHERE database = 'moetrace'")
        return sorted(row[0] for row in found.result_rows)
