"""The HTTP server in a thread of its own: one socket for OTLP, metrics and queries."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from moetrace_collectors.errors import UsageError

MAX_CONNECTIONS = 1_024
GRACE_S = 10
"""How long running requests may take to end when the server stops, seconds."""
START_TIMEOUT_S = 10.0


class HttpServer:
    """Bound when made, serving between `start` and `stop`."""

    def __init__(self, *, host: str, port: int) -> None:
        """Bind, so that a taken port is known before anything else is opened.

        Raises:
            UsageError: the port is taken, or the host is not an address of this machine.
        """
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, routes: Sequence[Route]) -> None:
        """Serve these routes; returns once requests are answered."""
        app: ASGIApp = Starlette(routes=list(routes))
        if _is_loopback(self._socket.getsockname()[0]):
            app = LoopbackHostOnly(app)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=GRACE_S,
        )
        server = self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=server.run, args=([self._socket],), name="moetrace-http", daemon=True
        )
        self._thread.start()
        pause = threading.Event()
        for _ in range(int(START_TIMEOUT_S * 100)):
            if server.started or not self._thread.is_alive():
                break
            pause.wait(0.01)
        if not server.started:
            raise UsageError("the HTTP server did not start; see the log above")

    def stop(self) -> None:
        """Refuse new requests, let running ones end, close the socket; harmless where it never started."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(GRACE_S + 5)
        self._socket.close()


class LoopbackHostOnly:
    """Refuses requests whose Host is not a loopback name.

    A web page can point its own name at 127.0.0.1 and then read what a loopback service answers; the
    Host header gives it away.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"localhost").decode("latin-1")
            if not _is_loopback(_without_port(host)):
                answer = PlainTextResponse(
                    "this collector listens on loopback only: ask it as 127.0.0.1\n", 421
                )
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    except OSError as error:
        raise UsageError(f"host = {host!r}: no such address ({error})") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror}; "
            "choose another port with --http-port (0 = any free one)"
        ) from error
    return listener
