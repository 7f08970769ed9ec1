"""The exporter's HTTP session: requests after the first one go a shorter way, and say the same."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests

from moetrace.emit.quick_session import QuickSession


class Server:
    """Keeps what it is sent; answers as it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.hang = threading.Event()
        """Cleared: no answer before it is set."""
        self.hang.set()
        self.connections = 0
        self.hangs_up = False
        """Whether connections are closed behind an answer, without a word."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                server.connections += 1
                super().setup()

            def do_POST(self) -> None:
                body = gzip.decompress(self.rfile.read(int(self.headers["Content-Length"])))
                server.seen.append((dict(self.headers), body))
                server.hang.wait(30)
                status, headers = server.answers.pop(0) if server.answers else (200, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")
                self.close_connection = server.hangs_up

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Take no more connections."""
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    """One that is stopped in the end."""
    running = Server()
    yield running
    running.stop()


class CountingSession(QuickSession):
    """Counts requests that go through the whole of requests."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = 0
        self.noted: list[int] = []
        self.hooks["response"].append(lambda response, *_, **__: self.noted.append(response.status_code))

    def send(self, request: requests.PreparedRequest, **named: Any) -> requests.Response:
        """As its class says."""
        self.whole += 1
        return super().send(request, **named)


def post(session: requests.Session, url: str, body: bytes, timeout: float = 20.0) -> requests.Response:
    """As opentelemetry's exporter does it: with what is left of its time."""
    headers = {"Content-Type": "application/x-protobuf", "X-Run": "a"}
    return session.request(
        method="POST", url=url, headers=headers, data=body, timeout=timeout, allow_redirects=False
    )


def test_later_requests_say_the_same_on_the_same_connection(server: Server) -> None:
    """Headers and answers are those of the first request; only the first one is prepared by requests."""
    session = CountingSession()
    answers = [post(session, server.url, body, 20.0 - at) for at, body in enumerate((b"one", b"", b"three!"))]
    assert session.whole == 1
    assert [(answer.status_code, answer.text, answer.ok) for answer in answers] == [(200, "ok", True)] * 3
    assert [body for _, body in server.seen] == [b"one", b"", b"three!"]
    first, *later = [
        {name: value for name, value in headers.items() if name != "Content-Length"}
        for headers, _ in server.seen
    ]
    assert later == [first, first]
    assert server.connections == 1
    assert session.noted == [200, 200, 200]


def test_a_refusal_is_an_answer(server: Server) -> None:
    """A status that is no success is handed on and noted, as requests does, with its headers."""
    session = CountingSession()
    post(session, server.url, b"one")
    server.answers = [(429, {"Retry-After": "7"})]
    answer = post(session, server.url, b"two")
    assert (answer.status_code, answer.ok, answer.headers["retry-after"]) == (429, False, "7")
    assert session.noted == [200, 429]


def test_authentication_is_asked_for_every_request(server: Server) -> None:
    """A token that was replaced shows in the next request."""
    tokens = iter(("first", "second"))

    def authenticate(request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {next(tokens)}"
        return request

    session = CountingSession()
    session.auth = authenticate
    post(session, server.url, b"one")
    post(session, server.url, b"two")
    assert [headers["Authorization"] for headers, _ in server.seen] == ["Bearer first", "Bearer second"]


def test_what_is_not_plain_goes_through_requests(server: Server) -> None:
    """Cookies, other headers and redirects are left to requests."""
    session = CountingSession()
    server.answers = [(200, {"Set-Cookie": "stick=here"})]
    post(session, server.url, b"one")
    post(session, server.url, b"two")
    assert session.whole == 2
    assert server.seen[1][0]["Cookie"] == "stick=here"
    session = CountingSession()
    post(session, server.url, b"one")
    server.answers = [(307, {"Location": "/elsewhere"})]
    post(session, server.url, b"two")
    assert session.whole == 2


def test_a_server_that_went_away_is_told_as_requests_tells_it(server: Server) -> None:
    """A connection that breaks is tried once through requests, whose error it then is."""
    session = CountingSession()
    server.hangs_up = True
    post(session, server.url, b"one")
    server.stop()
    with pytest.raises(requests.exceptions.ConnectionError):
        post(session, server.url, b"two")
    assert session.whole == 2


def test_a_server_that_does_not_answer_gets_one_request(server: Server) -> None:
    """After the time that was given the request is over; it is not sent a second time."""
    session = CountingSession()
    post(session, server.url, b"one")
    server.hang.clear()
    with pytest.raises(requests.exceptions.Timeout):
        post(session, server.url, b"two", timeout=0.05)
    assert (session.whole, len(server.seen)) == (1, 2)
