"""What people and scrapers ask the collector: health, metrics, and SQL as a ClickHouse server takes it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from moetrace_collectors import native_blocks
from moetrace_collectors.access.scopes import RouteScopes, Scope
from moetrace_collectors.read_only_query import Query, QueryError, QueryRunner
from moetrace_schemas.enums import QueryFailure

SCOPES: RouteScopes = {"/healthz": None, "/-/reload": Scope.ADMIN}
"""Everything else asks for `read`, with what a later page adds."""
MAX_QUERY_BYTES = 2**20
QUERY_BODY_TIMEOUT_S = 10.0
PIECE_BYTES = 2**20
_FAILURE = {
    400: QueryFailure.BAD_REQUEST,
    403: QueryFailure.NOT_ALLOWED,
    404: QueryFailure.NOT_FOUND,
    413: QueryFailure.TOO_LARGE,
    503: QueryFailure.TOO_MANY,
    504: QueryFailure.TIMEOUT,
    507: QueryFailure.MEMORY,
}
"""Why, by the HTTP status that says so."""
_TRAILING_FORMAT = re.compile(r"\bFORMAT\s+(\w+)\s*;?\s*$", re.IGNORECASE)
_PARAMETER_PREFIX = "param_"
_TRANSPORT = frozenset(
    {
        "query", "default_format", "database", "user", "password", "wait_end_of_query", "buffer_size",
        "session_id", "session_timeout", "session_check", "query_id", "quota_key", "decompress", "role",
        "client_protocol_version", "send_progress_in_http_headers", "http_headers_progress_interval_ms",
        "enable_http_compression", "cancel_http_readonly_queries_on_client_close",
    }
)  # fmt: skip
"""Parameters of ClickHouse's HTTP interface that are no settings. Those not read below (user, session, ...)
are drivers' defaults that change nothing here: the endpoint is one reader without a session."""


class ResultResponse(Response):
    """A result in pieces, each written once the client has read the one before.

    So a client that is merely slow is told from one that reads nothing.
    """

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        left = memoryview(self.body)
        while len(left) > PIECE_BYTES:
            await send({"type": "http.response.body", "body": bytes(left[:PIECE_BYTES]), "more_body": True})
            left = left[PIECE_BYTES:]
            # A client that has gone is noticed in between.
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": bytes(left)})


class Pages:
    """GET /healthz, /metrics and /ping; GET and POST / for SQL; POST /-/reload."""

    def __init__(
        self,
        *,
        registry: CollectorRegistry,
        queries: QueryRunner,
        is_healthy: Callable[[], bool],
        trouble: Callable[[], str] = lambda: "",
        on_query_failed: Callable[[QueryFailure], None],
        reload: Callable[[], None],
    ) -> None:
        """Take what the pages show.

        Args:
            registry: metrics.
            queries: runs SQL.
            is_healthy: whether the worker runs, without which nothing is stored.
            trouble: what keeps requests from being acknowledged, in one line; empty where nothing does.
            on_query_failed: counts.
            reload: reads tokens and certificate again.
        """
        self._registry = registry
        self._queries = queries
        self._is_healthy = is_healthy
        self._trouble = trouble
        self._on_query_failed = on_query_failed
        self._reload = reload

    def routes(self) -> list[Route]:
        """The routes to mount."""
        return [
            Route("/healthz", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/ping", self._ping, methods=["GET"]),
            Route("/", self._query, methods=["GET", "POST"]),
            Route("/-/reload", self._reload_access, methods=["POST"]),
        ]

    async def _health(self, request: Request) -> Response:
        if not self._is_healthy():
            return PlainTextResponse("the worker has ended: nothing is joined or stored any more\n", 503)
        trouble = self._trouble()
        if trouble:
            return PlainTextResponse(f"{trouble}\n", 503)
        return PlainTextResponse("ok\n")

    async def _reload_access(self, request: Request) -> Response:
        await run_in_threadpool(self._reload)
        return PlainTextResponse("read again\n")

    async def _ping(self, request: Request) -> Response:
        return PlainTextResponse("Ok.\n")

    async def _metrics(self, request: Request) -> Response:
        text = await run_in_threadpool(generate_latest, self._registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _query(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(QUERY_BODY_TIMEOUT_S):
                body = await _read_body(request)
            sql = "\n".join(part for part in (request.query_params.get("query", ""), body) if part)
            if not sql and request.method == "GET":
                if "text/html" in request.headers.get("accept", ""):
                    return RedirectResponse("ui/")  # a browser, and so a person
                # What a ClickHouse server says to a bare GET.
                return PlainTextResponse("Ok.\n")
            query = _query(request, sql)
            # Not the pool that decodes requests: slow queries must not keep ranks waiting.
            result = await asyncio.to_thread(self._queries.run, query)
            if query.format == "Native" and _protocol_version(request) >= native_blocks.FIRST_VERSION:
                result = await asyncio.to_thread(native_blocks.with_block_info, result)
        except native_blocks.NativeBlockError as error:
            return PlainTextResponse(f"{error}\n", 400)
        except QueryError as error:
            self._on_query_failed(_FAILURE.get(error.status, QueryFailure.FAILED))
            headers = {"X-ClickHouse-Exception-Code": str(error.code)} if error.code else {}
            if error.status == 503:
                headers["Retry-After"] = "1"
            return PlainTextResponse(f"{error}\n", error.status, headers=headers)
        except TimeoutError:
            self._on_query_failed(QueryFailure.NOT_RECEIVED)
            return PlainTextResponse("query not received in time\n", 408)
        except ClientDisconnect:
            self._on_query_failed(QueryFailure.NOT_RECEIVED)
            return Response(status_code=499)
        return ResultResponse(
            result,
            headers={
                "Content-Type": "text/plain; charset=utf-8",
                "X-ClickHouse-Format": query.format,
                "X-ClickHouse-Summary": "{}",
            },
        )


def _protocol_version(request: Request) -> int:
    text = request.query_params.get("client_protocol_version", "0")
    return int(text) if text.isdecimal() and len(text) < 9 else 0


async def _read_body(request: Request) -> str:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_QUERY_BYTES:
            raise QueryError(f"query is larger than {MAX_QUERY_BYTES} bytes", status=413)
        parts.append(part)
    try:
        return b"".join(parts).decode()
    except UnicodeDecodeError as error:
        raise QueryError("query is not UTF-8", status=400) from error


def _query(request: Request, sql: str) -> Query:
    parameters: dict[str, str] = {}
    settings: dict[str, str] = {}
    for name, value in request.query_params.items():
        if name.startswith(_PARAMETER_PREFIX):
            parameters[name.removeprefix(_PARAMETER_PREFIX)] = value
        elif name == "compress":
            if value not in ("", "0"):
                raise QueryError("compress=1: ClickHouse's block compression is not spoken here", status=400)
        elif name not in _TRANSPORT:
            settings[name] = value
    named = _TRAILING_FORMAT.search(sql)
    return Query(
        sql=sql,
        format=named[1] if named else request.query_params.get("default_format", "TabSeparated"),
        database=request.query_params.get("database", ""),
        parameters=parameters,
        settings=settings,
    )
