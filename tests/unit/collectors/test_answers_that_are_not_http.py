"""Commands that are given an address where something else than a collector's HTTP answers."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moetrace_collectors.cli import main

HTTP2_SETTINGS = b"\x00\x00\x1e\x04\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00\n"
"""How a gRPC port greets whoever connects."""
BROKEN_OFF = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}"
COMMANDS = [
    ["query", "SELECT 1"],
    ["report"],
    ["top", "--once"],
    ["doctor"],
    ["placement", "list"],
    ["load", "--run", "r"],
    ["export", "--perfetto", "x.json"],
]


@contextmanager
def answering(with_bytes: bytes) -> Iterator[int]:
    """A port where every request gets these bytes and the end of the connection."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(with_bytes)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(HTTP2_SETTINGS, "what answers speaks no HTTP; is it the gRPC port?", id="grpc"),
        pytest.param(BROKEN_OFF, "its answer broke off after 2 bytes", id="broken off"),
    ],
)
def test_one_line_says_that_no_collector_answers(
    command: list[str], answer: bytes, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The gRPC port in place of the HTTP one, or a collector that dies in its answer: one line, exit 2."""
    with answering(answer) as port:
        code = main([*command, "--url", f"http://127.0.0.1:{port}"])
    out, err = capfd.readouterr()
    assert code == 2
    assert out == ""
    assert f"no collector answers at http://127.0.0.1:{port} ({reason}): check --url" in err
    assert err.count("\n") == 1


def test_a_push_to_something_else_than_grafana_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """The same for Grafana's address: what came is not repeated, for it may be binary."""
    with answering(HTTP2_SETTINGS) as port:
        code = main(["dashboards", "push", "--grafana-url", f"http://127.0.0.1:{port}", "--token", "t"])
    err = capfd.readouterr().err
    assert code == 2
    assert (
        f"no Grafana answers at http://127.0.0.1:{port} (what answers speaks no HTTP): check --grafana-url"
        in err
    )
    assert err.count("\n") == 1
