"""A collector in a process of its own, for tests: started on free ports, asked over HTTP, stopped by SIGTERM.

The embedded engine opens one path per process, so whatever needs a store runs in a child process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{[^}]*\})? (?P<value>\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An HTTP answer, whatever its status."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True, kw_only=True)
class CollectorProcess:
    """A running collector."""

    process: subprocess.Popen[str]
    directory: Path
    http_address: str
    grpc_address: str
    lines: list[str] = field(default_factory=list)
    """What it has written to stderr."""
    reader: threading.Thread | None = None
    """Reads stderr, so that a collector that says much does not wait for a test to read it."""

    def post(
        self,
        body: bytes,
        *,
        path: str = "/v1/traces",
        content_type: str = "application/x-protobuf",
        **headers: str,
    ) -> Answer:
        """Send a body; `content_encoding="gzip"` becomes the header Content-Encoding."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return ask(f"{self.http_address}{path}", body, {"Content-Type": content_type, **named})

    def send(self, message: ExportTraceServiceRequest) -> Answer:
        """Send an export request in protobuf."""
        return self.post(message.SerializeToString())

    def get(self, path: str) -> Answer:
        """Ask for a page."""
        return ask(f"{self.http_address}{path}", None, {})

    def metric(self, name: str) -> float:
        """Sum over the label sets of a metric."""
        text = self.get("/metrics").body.decode()
        matches = (_SAMPLE.fullmatch(line) for line in text.splitlines())
        return sum(float(match["value"]) for match in matches if match and match["name"] == name)

    def wait_for(self, name: str, value: float) -> None:
        """Wait until a metric has reached a value; the test's own assertions say what is wrong if not."""
        deadline = time.monotonic() + 20
        while self.metric(name) < value and time.monotonic() < deadline:
            time.sleep(0.05)

    def terminate(self) -> int:
        """SIGTERM, and the exit code; where that is not 0, what it said is in the test's own output."""
        self.process.send_signal(signal.SIGTERM)
        code: int | None = None
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        finally:
            if code != 0:
                print(f"the collector ended with {code} and had said:\n{self.said()}")
        return code

    def said(self) -> str:
        """What it has written to stderr; all of it, once it has ended."""
        if self.reader is not None and self.process.poll() is not None:
            self.reader.join(STOP_TIMEOUT_S)
        return "".join(self.lines)


def ask(url: str, body: bytes | None, headers: dict[str, str]) -> Answer:
    """One HTTP request."""
    request = urllib.request.Request(url, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return Answer(status=answer.status, headers=dict(answer.headers), body=answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(status=error.code, headers=dict(error.headers), body=error.read())


def environment() -> dict[str, str]:
    """Environment in which the checkout's packages are found, installed or not."""
    paths = [str(ROOT / "collectors"), str(ROOT / "schemas"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def moetrace(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "moetrace_collectors.cli", *arguments],
        env=environment(),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_script(name: str, *arguments: object, timeout_s: float = 300.0) -> str:
    """What a module of tests/ prints, run in a process of its own: an engine opens one path per process."""
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", name, *map(str, arguments)],
        env={**env, "TZ": "UTC"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(directory: Path, sql: str) -> list[dict[str, object]]:
    """Rows of a run's store through `moetrace query`."""
    done = moetrace("query", "--dir", str(directory), "--format", "JSONEachRow", sql)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _noted_pid(note: Path) -> int | None:
    """Who the note names: nobody, or one that was killed and has left it behind until the new one comes."""
    try:
        return int(json.loads(note.read_text())["pid"])
    except FileNotFoundError:
        return None


@contextmanager
def collector(directory: Path, *options: str) -> Iterator[CollectorProcess]:
    """A collector on free ports; killed at the end if the test has not stopped it."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "moetrace_collectors.cli", "collect",
            "--dir", str(directory), "--http-port", "0", "--grpc-port", "0", *options,
        ],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    lines: list[str] = []
    reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        note = directory / "collector.json"
        deadline = time.monotonic() + START_TIMEOUT_S
        while _noted_pid(note) != process.pid:
            if process.poll() is not None or time.monotonic() > deadline:
                # One that still runs would keep its end of the pipe open.
                process.kill()
                reader.join(STOP_TIMEOUT_S)
                raise AssertionError(f"the collector did not start: {''.join(lines)}")
            time.sleep(0.02)
        fields = json.loads(note.read_text())
        yield CollectorProcess(
            process=process,
            directory=directory,
            http_address=fields["http_address"],
            grpc_address=fields["grpc_address"],
            lines=lines,
            reader=reader,
        )
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join(STOP_TIMEOUT_S)
        process.stderr.close()
