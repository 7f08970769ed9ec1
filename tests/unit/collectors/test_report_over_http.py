"""A running collector owns its store; the report reads it over HTTP and shows the same."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import hand_made_run
from moetrace_collectors.errors import UsageError
from moetrace_collectors.views.store_rows import HttpStore

Request = tuple[dict[str, list[str]], str]


@contextmanager
def endpoint(status: int, body: str) -> Iterator[tuple[str, list[Request]]]:
    """An HTTP server with one answer, and the (parameters, body) of what it was asked."""
    asked: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Note the request, give the answer."""
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            asked.append((parse_qs(urlsplit(self.path).query), text))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            """Stay quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_values_travel_beside_the_query_and_are_escaped() -> None:
    """A run id with quotes, tabs and backslashes is a parameter; the SQL text is sent as it is written."""
    with endpoint(200, '{"a": 1}\n{"a": null}\n') as (url, asked):
        rows = HttpStore(url).rows("SELECT {run:String}", {"run": "a'b\t\\n", "ranks": [1, 2]})
    assert rows == [{"a": 1}, {"a": None}]
    parameters, text = asked[0]
    assert text == "SELECT {run:String}"
    assert parameters["param_run"] == ["a'b\\t\\\\n"]
    assert parameters["param_ranks"] == ["[1, 2]"]
    assert parameters["param_database"] == ["moetrace"]
    assert parameters["default_format"] == ["JSONEachRow"]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, "Code: 60. DB::Exception: no such table (UNKNOWN_TABLE)", "holds no tables of moetrace"),
        (403, "only reading statements\nsecond line", "did not answer a query: only reading statements"),
        (500, "", "did not answer a query: HTTP 500"),
        (200, "<html>not a collector</html>", "did not answer with JSON rows: check --url"),
    ],
)
def test_refusal_is_one_line(status: int, body: str, message: str) -> None:
    """Whatever answers instead of a collector, the user gets one line that names the address."""
    with endpoint(status, body) as (url, _):
        with pytest.raises(UsageError) as caught:
            HttpStore(url).rows("SELECT 1", {})
        assert message in str(caught.value)
        assert url in str(caught.value)
        assert "\n" not in str(caught.value)


def test_password_of_an_address_is_not_shown() -> None:
    """Messages and documents name the store without its password."""
    assert HttpStore("https://user:secret@host:8443").address == "https://user:***@host:8443"


def report_document(directory: Path) -> dict[str, Any]:
    """What `moetrace report --json` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "moetrace_collectors.cli", "report", "--dir", str(directory), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_live_collector_and_stopped_one_give_the_same_document(tmp_path: Path) -> None:
    """The same run, read through its collector and then from the store it left, is the same document."""
    script = Path(hand_made_run.__file__)
    subprocess.run([sys.executable, str(script), str(tmp_path / "store")], check=True, timeout=120)
    arguments = ["collect", "--dir", str(tmp_path), "--http-port", "0", "--no-grpc"]
    collector = subprocess.Popen(
        [sys.executable, "-m", "moetrace_collectors.cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "collector.json").is_file():
            assert collector.poll() is None, "the collector ended before it was ready"
            assert time.monotonic() < deadline, "the collector was not ready in time"
            time.sleep(0.05)
        live = report_document(tmp_path)
    finally:
        collector.terminate()
        collector.wait(timeout=60)
    assert live["run_id"] == hand_made_run.RUN_ID
    assert live == report_document(tmp_path)
