"""The HTTP server in a thread of its own: one socket for OTLP, metrics, SQL and pages, behind one gate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from moetrace_collectors.access.control import AccessControl, open_access
from moetrace_collectors.access.gate import AccessGate
from moetrace_collectors.access.posture import is_loopback
from moetrace_collectors.access.scopes import RouteScopes
from moetrace_collectors.access.tls import ServerTls
from moetrace_collectors.errors import UsageError
from moetrace_collectors.receivers.bounded_http import (
    HEAD_TIMEOUT_S,
    READ_TIMEOUT_S,
    STOP_GRACE_S,
    bounded_protocol,
)
from moetrace_collectors.receivers.listening import listen

MAX_CONNECTIONS = 1_024
END_S = 5
"""Beyond STOP_GRACE_S: for requests that were cut off to find their end, seconds."""
START_TIMEOUT_S = 10.0


class HttpServer:
    """Bound when made, serving between `start` and `stop`."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        tls: ServerTls | None = None,
        max_connections: int = MAX_CONNECTIONS,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
        stop_grace_s: float = STOP_GRACE_S,
        port_flag: str = "--http-port",
    ) -> None:
        """Bind, so that a taken port is known before anything else is opened.

        Raises:
            UsageError: the port is taken, or the host is not an address of this machine.
        """
        self._socket = listen(
            host, port, purpose="HTTP", port_flag=port_flag, backlog=min(max_connections, 4_096)
        )
        self.port: int = self._socket.getsockname()[1]
        self._tls = tls
        self._max_connections = max_connections
        self._head_timeout_s = head_timeout_s
        self._read_timeout_s = read_timeout_s
        self._stop_grace_s = stop_grace_s
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        routes: Sequence[BaseRoute],
        *,
        direct: Mapping[str, ASGIApp] | None = None,
        control: AccessControl | None = None,
        scopes: RouteScopes | None = None,
    ) -> None:
        """Serve these routes; returns once requests are answered.

        Args:
            routes: of the web framework.
            direct: applications by path that do without it, all methods of the path.
            control: who may ask; None for everyone.
            scopes: scopes of routes by path; those not named ask for `read`.
        """
        control = control or open_access()
        app = Starlette(routes=list(routes))
        # A redirect would repeat what the request says of its host and query; who errs by a slash gets 404.
        app.router.redirect_slashes = False
        gate = AccessGate(
            _by_path(direct or {}, app),
            control=control,
            scopes=scopes or {},
            loopback_only=is_loopback(self._socket.getsockname()[0]),
        )
        config = uvicorn.Config(
            gate,
            http=bounded_protocol(
                self._max_connections,
                control.count,
                head_timeout_s=self._head_timeout_s,
                read_timeout_s=self._read_timeout_s,
                stop_grace_s=self._stop_grace_s,
            ),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # Who asks is who connects: a header that anyone may send must not change a client's address.
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(self._stop_grace_s + END_S / 2),
        )
        config.load()
        if self._tls is not None:
            config.ssl = self._tls.context
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

    def stop(self, *, interrupt: Callable[[], None] = lambda: None) -> None:
        """Refuse new requests, let running ones end, close the socket; harmless where it never started.

        Args:
            interrupt: ends what a request that is out of time still waits for.
        """
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(self._stop_grace_s)
            if self._thread.is_alive():
                interrupt()
                self._thread.join(END_S)
            self._thread = None
        self._socket.close()


def _by_path(direct: Mapping[str, ASGIApp], others: ASGIApp) -> ASGIApp:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await direct.get(scope["path"], others)(scope, receive, send)

    return application
