"""Prometheus and Alertmanager as processes of a test: free ports, a fast clock, nothing left behind."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PROMETHEUS = shutil.which("prometheus")
ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
START_TIMEOUT_S = 30.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """A running Prometheus."""

    address: str

    def instant(self, expr: str) -> list[dict[str, Any]]:
        """Samples now; a wrong expression is an AssertionError with Prometheus' own words."""
        return self._query("query", {"query": expr})

    def recent(self, expr: str, seconds: float = 20, step_s: float = 1) -> list[dict[str, Any]]:
        """Series over the last seconds, as a panel asks for them."""
        now = time.time()
        return self._query(
            "query_range", {"query": expr, "start": str(now - seconds), "end": str(now), "step": str(step_s)}
        )

    def value(self, expr: str) -> float:
        """The one sample of an expression."""
        found = self.instant(expr)
        assert len(found) == 1, (expr, found)
        return float(found[0]["value"][1])

    def _query(self, kind: str, parameters: dict[str, str]) -> list[dict[str, Any]]:
        url = f"{self.address}/api/v1/{kind}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return result
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters['query']}: {error.read().decode()}") from error


@contextmanager
def prometheus(
    directory: Path,
    targets: dict[str, str],
    rule_files: Sequence[Path],
    alertmanager_address: str | None = None,
    scrape: Mapping[str, Any] | None = None,
) -> Iterator[Prometheus]:
    """Scrapes job -> host:port every second, with `scrape` in each job's entry; evaluates rules as often."""
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rule_files],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}], **(scrape or {})}
            for job, target in targets.items()
        ],
    }
    if alertmanager_address:
        peers = [{"static_configs": [{"targets": [alertmanager_address.removeprefix("http://")]}]}]
        config["alerting"] = {"alertmanagers": peers}
    path = directory / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    assert PROMETHEUS is not None
    with _running(
        directory / "prometheus.log",
        [PROMETHEUS, f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}"],
        "--web.listen-address",
    ) as address:
        yield Prometheus(address=address)


@contextmanager
def alertmanager(directory: Path, webhook: str) -> Iterator[str]:
    """Sends every alert to the webhook at once; yields its address."""
    directory.mkdir(parents=True, exist_ok=True)
    receiver = {"name": "test", "webhook_configs": [{"url": webhook, "send_resolved": True}]}
    route = {"receiver": "test", "group_wait": "0s", "group_interval": "1s", "group_by": ["..."]}
    path = directory / "alertmanager.yaml"
    path.write_text(yaml.safe_dump({"route": route, "receivers": [receiver]}))
    assert ALERTMANAGER is not None
    command = [ALERTMANAGER, f"--config.file={path}", f"--storage.path={directory / 'data'}"]
    with _running(
        directory / "alertmanager.log", [*command, "--cluster.listen-address="], "--web.listen-address"
    ) as address:
        yield address


@contextmanager
def _running(log: Path, command: Sequence[str], listen_option: str) -> Iterator[str]:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, f"{listen_option}=127.0.0.1:{port}"], stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{command[0]} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/-/ready", timeout=2) as answer:
            ready: bool = answer.status == 200
            return ready
    except OSError:
        return False
