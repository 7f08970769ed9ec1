"""A collector that does as it is told: takes spans, refuses them, or never answers."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class FakeCollector:
    """OTLP over HTTP on a free port; answers with the queued status codes first, then with 200."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []
        self.rejection: ExportTracePartialSuccess | None = None
        """What it says of every request that it takes."""
        self.too_large: Callable[[list[int]], bool] = lambda steps: False
        """Whether a request with these steps is refused for its size."""
        self.location = ""
        """Where it says it is, if anywhere."""
        self.refused = 0
        self._arrived = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._take(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def _take(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        request = ExportTraceServiceRequest.FromString(gzip.decompress(body))
        with self._arrived:
            status = self.statuses.pop(0) if self.statuses else 200
            if self.too_large(_steps(request)):
                status = 413
            if status == 200:
                self.headers.append({name.lower(): value for name, value in handler.headers.items()})
                self.paths.append(handler.path)
                self.requests.append(request)
            else:
                self.refused += 1
            self._arrived.notify_all()
        answer = ExportTraceServiceResponse(partial_success=self.rejection).SerializeToString()
        handler.send_response(status)
        # The exporter need not think for itself how long to wait.
        handler.send_header("Retry-After", "0")
        if self.location:
            handler.send_header("Location", self.location)
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)

    def spans(self) -> list[Any]:
        """All spans that were taken, in order of arrival."""
        return [span for request in list(self.requests) for span in _spans(request)]

    def steps(self) -> list[int]:
        """Numbers of the steps that were taken, in order of arrival."""
        return [step for request in list(self.requests) for step in _steps(request)]

    def wait_for(self, count: int, timeout_s: float = 10.0) -> list[Any]:
        """The spans, once there are `count` of them."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self.spans()) >= count, timeout_s):
                raise TimeoutError(f"{len(self.spans())} of {count} spans after {timeout_s} s")
            return self.spans()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _spans(request: ExportTraceServiceRequest) -> list[Any]:
    return [
        span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
    ]


def _steps(request: ExportTraceServiceRequest) -> list[int]:
    return [
        item.value.int_value
        for span in _spans(request)
        for item in span.attributes
        if item.key == "moetrace.step.index"
    ]


class Blackhole:
    """Accepts connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Close the door."""
        self._socket.close()


def refusing_endpoint() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for another thread.

    Raises:
        TimeoutError: it did not come to that in time.
    """
    gate, end = threading.Event(), time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_s} s")
        gate.wait(0.001)
