"""Other programs get through the collector's door as SECURITY.md says: Prometheus, curl, a browser."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from certificates import Certificates, make_certificates
from integration.collector_process import CollectorProcess, ask, collector
from integration.prometheus_process import PROMETHEUS, prometheus

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CURL = shutil.which("curl")
INGEST, READ = "ingest" * 6, "read" * 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of this module."""
    return make_certificates(tmp_path_factory.mktemp("tls"))


def tokens(directory: Path) -> Path:
    """A collector's token file."""
    path = directory / "tokens"
    path.write_text(f"ranks ingest {INGEST}\npeople read {READ}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, files: Certificates) -> Iterator[CollectorProcess]:
    """A collector with TLS and tokens."""
    directory = tmp_path_factory.mktemp("run")
    with collector(
        directory, "--tls-certificate", str(files.certificate), "--tls-key", str(files.key),
        "--token-file", str(tokens(directory)),
    ) as running:  # fmt: skip
        yield running


@pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus")
@pytest.mark.parametrize(("token", "up"), [(READ, 1.0), (INGEST, 0.0)])
def test_prometheus_scrapes_with_a_credentials_file(
    secured: CollectorProcess, files: Certificates, tmp_path: Path, token: str, up: float
) -> None:
    """The scrape settings of examples/compose/prometheus.yaml: up with scope read, down with another."""
    secret = tmp_path / "token"
    secret.write_text(token)
    scrape = {
        "scheme": "https",
        "authorization": {"credentials_file": str(secret)},
        "tls_config": {"ca_file": str(files.ca)},
    }
    target = {"moetrace": secured.http_address.removeprefix("https://")}
    with prometheus(tmp_path / "prometheus", target, [], scrape=scrape) as server:
        deadline = time.monotonic() + 30
        while not (found := server.instant("up")) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert [float(sample["value"][1]) for sample in found] == [up]


@pytest.mark.skipif(CURL is None, reason="needs curl")
def test_curl_asks_with_a_header_file(secured: CollectorProcess, files: Certificates, tmp_path: Path) -> None:
    """The token stands in a file and not on the command line."""
    header = tmp_path / "header"
    header.write_text(f"Authorization: Bearer {READ}\n")
    assert CURL is not None
    done = subprocess.run(
        [
            CURL,
            "-sS",
            "--cacert",
            str(files.ca),
            "-H",
            f"@{header}",
            f"{secured.http_address}/?query=SELECT%201",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "1\n"


def dump(url: str, profile: Path) -> str:
    """What a browser shows."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000",
            f"--user-data-dir={profile}", "--dump-dom", url,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    return done.stdout


@contextmanager
def page(text: str) -> Iterator[str]:
    """A page of another origin."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://localhost:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_gets_in_and_a_foreign_page_in_it_does_not(tmp_path: Path) -> None:
    """The token as password opens a page; images, frames, forms and fetches of another origin are refused."""
    with collector(tmp_path, "--token-file", str(tokens(tmp_path)), "--open-metrics") as process:
        host = process.http_address.removeprefix("http://")
        assert "Ok." in dump(f"http://anyone:{READ}@{host}/ping", tmp_path / "profile")
        assert "Ok." not in dump(f"http://{host}/ping", tmp_path / "profile")

        def refused() -> float:
            text = ask(f"{process.http_address}/metrics", None, {}).body.decode()
            line = next(line for line in text.splitlines() if 'refused_total{reason="cross_site"}' in line)
            return float(line.split()[-1])

        assert refused() == 0
        foreign = (
            f"<img src='http://{host}/metrics'><iframe src='http://{host}/metrics'></iframe>"
            f"<script>fetch('http://{host}/?query=SELECT%201', "
            "{method: 'POST', mode: 'no-cors', body: 'x'})</script>"
        )
        with page(foreign) as address:
            dump(address, tmp_path / "profile")
        assert refused() == 3
