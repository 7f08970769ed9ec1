"""The exporter's HTTP session: less work for the same requests and answers."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests

from moetrace.emit import quick_session
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


def post(session: requests.Session, url: str, body: bytes, timeout: float = 20.0) -> requests.Response:
    """As opentelemetry's exporter does it: with what is left of its time."""
    headers = {"Content-Type": "application/x-protobuf", "X-Run": "a"}
    return session.request(
        method="POST", url=url, headers=headers, data=body, timeout=timeout, allow_redirects=False
    )


def test_bodies_arrive_on_one_connection_and_answers_are_noted(server: Server) -> None:
    """Each body once, compressed, with the caller's headers; a refusal is an answer like any other."""
    session, noted = QuickSession(), []
    session.hooks["response"].append(lambda response, *_, **__: noted.append(response.status_code))
    server.answers = [(200, {}), (429, {"Retry-After": "7"}), (200, {})]
    answers = [post(session, server.url, body) for body in (b"one", b"", b"three!")]
    assert [body for _, body in server.seen] == [b"one", b"", b"three!"]
    assert {(headers["X-Run"], headers["Content-Encoding"]) for headers, _ in server.seen} == {("a", "gzip")}
    assert [answer.status_code for answer in answers] == noted == [200, 429, 200]
    assert answers[1].headers["retry-after"] == "7"
    assert server.connections == 1


@pytest.mark.parametrize("with_isal", [True, False])
@pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 1_000])
def test_any_gzip_reads_what_was_packed(
    monkeypatch: pytest.MonkeyPatch, with_isal: bool, body: bytes
) -> None:
    """By isal where it is installed, by zlib where it is not: one member with its checksum and length."""
    if with_isal:
        pytest.importorskip("isal")
    else:
        monkeypatch.setitem(sys.modules, "isal", None)
    packed = quick_session.quickest()(body)
    assert gzip.decompress(packed) == body
    assert len(packed) < len(body) / 10 + 100
    with pytest.raises((EOFError, gzip.BadGzipFile)):
        gzip.decompress(packed[:-1])


def test_isal_is_asked_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per body, for gzip at the lowest level that compresses."""
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    asked = []
    monkeypatch.setattr(isal_zlib, "compress", lambda *what: asked.append(what) or b"packed")
    assert quick_session.quickest()(b"body") == b"packed"
    assert asked == [(b"body", 1, 31)]


def test_a_cookie_is_shown_from_then_on(server: Server) -> None:
    """What keeps a process with one of several collectors, whenever it comes."""
    session = QuickSession()
    server.answers = [(200, {}), (200, {"Set-Cookie": "stick=here"})]
    for body in (b"one", b"two", b"three"):
        post(session, server.url, body)
    assert [headers.get("Cookie") for headers, _ in server.seen] == [None, None, "stick=here"]


def test_a_server_that_does_not_answer_gets_one_request(server: Server) -> None:
    """After the time that was given the request is over; it is not sent a second time."""
    session = QuickSession()
    post(session, server.url, b"one")
    server.hang.clear()
    with pytest.raises(requests.exceptions.Timeout):
        post(session, server.url, b"two", timeout=0.05)
    assert len(server.seen) == 2


def test_the_environment_is_asked_once_for_all_that_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request says of proxies and certificates itself is not taken for another one's."""
    asked = []

    def looked_up(self: requests.Session, *what: Any) -> dict[str, Any]:
        asked.append(what)
        return dict(zip(("proxies", "stream", "verify", "cert"), what[1:], strict=True))

    monkeypatch.setattr(requests.Session, "merge_environment_settings", looked_up)
    session, url = QuickSession(), "https://collector/v1/traces"
    calls: list[tuple[Any, ...]] = [
        (url, {}, False, True, None),
        (url, {"https": "http://proxy"}, False, True, None),
        (url, {}, False, "/other/ca.pem", None),
        (url, {}, False, True, ("client.pem", "client.key")),
        ("https://other/v1/traces", {}, False, True, None),
    ]
    for _ in range(2):
        for call in calls:
            merged = session.merge_environment_settings(*call)
            assert tuple(merged.values()) == call[1:]
    assert asked == calls
