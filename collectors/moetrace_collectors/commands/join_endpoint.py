"""Where `moetrace join` serves its metrics: arguments, who may ask, the server."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetrace_collectors.config import CollectorConfig
from moetrace_collectors.errors import UsageError

if TYPE_CHECKING:
    from moetrace_collectors.access.server_access import ServerAccess
    from moetrace_collectors.receivers.http_server import HttpServer
    from moetrace_collectors.store_join.join_metrics import JoinMetrics

MAX_PORT = 65_535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the endpoint."""
    group = parser.add_argument_group("metrics")
    group.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve /metrics and /healthz there; 0 = any free port",
    )
    group.add_argument(
        "--host", default="127.0.0.1", help="address to serve them on; beyond loopback as for collect"
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="serve beyond loopback without TLS or without tokens, on a network you trust",
    )
    group.add_argument("--tls-certificate", metavar="FILE", default="", help="certificate and chain (PEM)")
    group.add_argument("--tls-key", metavar="FILE", default="", help="its key (PEM)")
    group.add_argument(
        "--tls-client-ca",
        metavar="FILE",
        default="",
        help="every client must show a certificate of these authorities",
    )
    group.add_argument(
        "--token-file", metavar="FILE", default="", help="tokens, one 'NAME SCOPES TOKEN' a line; scope read"
    )
    group.add_argument("--open-metrics", action="store_true", help="/metrics needs no token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Bound; serving once started."""

    metrics: JoinMetrics
    url: str
    _server: HttpServer
    _access: ServerAccess
    _open_metrics: bool

    def start(self) -> None:
        """Serve."""
        self._server.start(
            self.metrics.routes(),
            control=self._access.control,
            scopes=self.metrics.scopes(open_metrics=self._open_metrics),
        )

    def refresh(self) -> None:
        """Read tokens and certificate again where their files have changed."""
        self._access.refresh()


def open_endpoint(arguments: argparse.Namespace, undo: ExitStack) -> Endpoint | None:
    """The endpoint that was asked for; None without `--metrics-port`.

    Raises:
        UsageError: it would be open to other machines, a file does not read, or the port is taken.
    """
    if arguments.metrics_port is None:
        return None
    if not 0 <= arguments.metrics_port <= MAX_PORT:
        raise UsageError(f"--metrics-port {arguments.metrics_port}: 0 to {MAX_PORT} expected")
    from moetrace_collectors.access.server_access import ServerAccess
    from moetrace_collectors.receivers.http_server import HttpServer
    from moetrace_collectors.store_join.join_metrics import JoinMetrics

    config = CollectorConfig(
        host=arguments.host,
        http_port=arguments.metrics_port,
        insecure=arguments.insecure,
        tls_certificate=arguments.tls_certificate,
        tls_key=arguments.tls_key,
        tls_client_ca=arguments.tls_client_ca,
        token_file=arguments.token_file,
        open_metrics=arguments.open_metrics,
    )
    metrics = JoinMetrics(series_budget=config.series_budget)
    access = ServerAccess(config, clock_ns=time.monotonic_ns, on_refused=metrics.own.refused)
    server = HttpServer(
        host=config.host,
        port=config.http_port,
        tls=access.tls,
        max_connections=config.max_connections,
        port_flag="--metrics-port",
    )
    undo.callback(server.stop)
    return Endpoint(
        metrics=metrics,
        url=f"{access.url(server.port)}/metrics",
        _server=server,
        _access=access,
        _open_metrics=config.open_metrics,
    )
