"""HTTP/1.1 connections: bounds on their number, on a head's time, and on what surrounds a body.

::

    connect ----> head of a request ----> body ----> answer ----> idle
       |<-- HEAD_TIMEOUT_S at most -->|<- receiver ->|<- *1 ->|   |<- keep-alive ->|
                                 the server stops: |<- STOP_GRACE_S at most ->|
    *1 each piece of it is read within READ_TIMEOUT_S

uvicorn bounds the time between requests and nothing else: connections that send half a head, or nothing,
would be kept for ever, and a thousand of them shut everyone else out. And a server that stops would wait
for clients that never send the rest of a body, or never read an answer. Its parser in C keeps whatever a
head or a trailer holds, so that is bounded here, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from moetrace_schemas.enums import RefuseReason

HEAD_TIMEOUT_S = 20.0
READ_TIMEOUT_S = 30.0
"""How long a client may read nothing of an answer, seconds; what is left of it lies in memory until then."""
STOP_GRACE_S = 10.0
"""How long running requests may take to end when the server stops, seconds."""
MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers. With the longest URL that a query comes in."""
FRAMING_PER_BODY_BYTE = 16
"""A chunk of one byte takes six; what is beyond is chunk extensions and trailers, which nobody needs."""
MAX_PIPELINED = 16
"""Requests of one connection that wait for the answers before theirs. uvicorn would take as many as come."""
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: 36\r\n\r\n"
    b"every connection is in use: try later"
)[:-1] + b"\n"


def bounded_protocol(
    max_connections: int,
    count: Callable[[RefuseReason], None],
    *,
    head_timeout_s: float = HEAD_TIMEOUT_S,
    read_timeout_s: float = READ_TIMEOUT_S,
    stop_grace_s: float = STOP_GRACE_S,
) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn.

    Args:
        max_connections: beyond it a new connection is answered 503 and closed.
        count: counts what is turned away.
        head_timeout_s: a connection whose request's head is not complete by then is closed, seconds.
        read_timeout_s: a connection whose client does not read what it was sent in that time is closed,
            seconds.
        stop_grace_s: a connection that is still open so long after the server began to stop is closed,
            seconds.
    """

    class BoundedProtocol(HttpToolsProtocol):  # type: ignore[misc]
        """One connection."""

        _head_timer: asyncio.TimerHandle | None = None
        _read_timer: asyncio.TimerHandle | None = None
        _is_in_head = _is_in_body = False
        timeout_keep_alive_task: asyncio.TimerHandle | None
        _answering: RequestResponseCycle | None = None
        """What runs; requests behind it wait."""
        _head_bytes = _framing_bytes = _body_bytes = 0
        """Of the request that is being read: what the parser has told, and what surrounds a body or is of a
        head that it has not yet told."""

        def connection_made(self, transport: Any) -> None:
            """Take the connection, or close it where there are enough."""
            super().connection_made(transport)
            # An "Upgrade: websocket" gets an ordinary answer; uvicorn writes two lines to the log for each.
            self._unsupported_upgrade_warning = _say_nothing
            if len(self.connections) > max_connections:
                count(RefuseReason.TOO_MANY_CONNECTIONS)
                transport.write(_BUSY)
                transport.close()
                return
            self._start_head_timer()

        def data_received(self, data: bytes) -> None:
            """Feed the parser; the head's time runs from the first byte that begins one."""
            if self.transport.is_closing():
                return
            self._framing_bytes += len(data)
            super().data_received(data)
            if self.transport.is_closing():
                return
            if self._framing_bytes > MAX_HEAD_BYTES + FRAMING_PER_BODY_BYTE * self._body_bytes:
                self.send_400_response(f"more than {MAX_HEAD_BYTES} bytes of headers")
                return
            is_answered = self.cycle is None or self.cycle.response_complete
            # A body that nobody waits for any more has as long as a head.
            if self._is_in_head or self.cycle is None or (self._is_in_body and is_answered):
                self._start_head_timer()
                return
            self._stop_head_timer()
            if is_answered and self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

        def on_message_begin(self) -> None:
            """Parser: the first byte of a request."""
            super().on_message_begin()
            self._is_in_head = True
            self._head_bytes = self._framing_bytes = self._body_bytes = 0

        def on_url(self, url: bytes) -> None:
            """Parser: a part of the URL."""
            self._count_head(len(url))
            super().on_url(url)

        def on_headers_complete(self) -> None:
            """Parser: the head is complete; what is raised becomes a 400."""
            hosts = sum(name == b"host" for name, _ in self.headers)
            if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
                # Two servers in a row could each believe another one.
                raise ValueError("one Host header expected")
            self._is_in_head, self._is_in_body = False, True
            self._framing_bytes = self._body_bytes = 0
            super().on_headers_complete()
            if len(self.pipeline) > MAX_PIPELINED:
                raise ValueError("too many requests at once")

        def on_message_complete(self) -> None:
            """Parser: the request is complete."""
            self._is_in_body = False
            super().on_message_complete()

        def on_header(self, name: bytes, value: bytes) -> None:
            """Parser: a header; those behind a body say nothing that is used here."""
            if self._is_in_head:
                self._count_head(len(name) + len(value))
                super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            """Parser: a part of the body."""
            self._framing_bytes -= len(body)
            self._body_bytes += len(body)
            super().on_body(body)

        def on_response_complete(self) -> None:
            """Between requests uvicorn's own timer watches."""
            if not self._is_in_head:
                self._stop_head_timer()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            """Let go."""
            self._stop_head_timer()
            self._stop_read_timer()
            if self._answering is not None:
                # uvicorn tells the last request only.
                self._answering.disconnected = True
                self._answering.message_event.set()
            super().connection_lost(exc)

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            self._answering = cycle
            super()._start_asgi_task(cycle, app)

        def shutdown(self) -> None:
            """The server stops: close when idle, else let the request end in the time it has for that."""
            super().shutdown()
            # Also one that is closing: it waits for its client to read what is left of an answer.
            self.loop.call_later(stop_grace_s, self.transport.abort)

        def send_400_response(self, msg: str) -> None:
            """Answer what is not HTTP, and count it."""
            count(RefuseReason.NOT_HTTP)
            self._stop_head_timer()
            if self.cycle is not None and not self.cycle.response_complete:
                # Not into the middle of the answer that is being sent.
                self.pipeline.clear()
                self.transport.abort()
                return
            super().send_400_response(msg)

        def _count_head(self, num_bytes: int) -> None:
            self._head_bytes += num_bytes
            if self._head_bytes > MAX_HEAD_BYTES:
                raise ValueError("a head that is too long")

        def pause_writing(self) -> None:
            """The client does not keep up; nothing more is written before it has."""
            super().pause_writing()
            self._stop_read_timer()
            self._read_timer = self.loop.call_later(read_timeout_s, self._is_not_read)

        def resume_writing(self) -> None:
            """It has."""
            self._stop_read_timer()
            super().resume_writing()

        def _stop_read_timer(self) -> None:
            if self._read_timer is not None:
                self._read_timer.cancel()
                self._read_timer = None

        def _is_not_read(self) -> None:
            self._read_timer = None
            count(RefuseReason.SLOW_REQUEST)
            self.transport.abort()

        def _start_head_timer(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(head_timeout_s, self._head_is_late)

        def _stop_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _head_is_late(self) -> None:
            self._head_timer = None
            count(RefuseReason.SLOW_REQUEST)
            self.transport.abort()

    return BoundedProtocol


def _say_nothing() -> None:
    pass
