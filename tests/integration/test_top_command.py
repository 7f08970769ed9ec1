"""`moetrace top` over a running collector: one frame, lines, and a real terminal with keys and resizes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.collector_process import CollectorProcess, collector, environment, moetrace
from moetrace_collectors.testing import SyntheticRun, request

RUN = SyntheticRun(run_id="live", world_size=4, num_layers=2, slow_rank=2, slow_layer=1, slow_ns=3_000_000)
STEPS = 30
PATIENCE_S = 60.0
SCREEN_ON, SCREEN_OFF = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """A collector that has joined some steps."""
    with collector(tmp_path_factory.mktemp("top") / "run") as running:
        for step in range(STEPS):
            running.send(request(RUN.step(step)))
        running.wait_for("moetrace_collector_joined_total", STEPS * RUN.world_size)
        wait_until_stored(running)
        yield running


def wait_until_stored(running: CollectorProcess) -> None:
    """Verdicts are written in batches: wait for the last one."""
    deadline = time.monotonic() + PATIENCE_S
    sql = "SELECT count() AS n FROM moetrace.step_verdicts FINAL FORMAT JSONEachRow"
    while time.monotonic() < deadline:
        answer = running.post(sql.encode(), path="/", content_type="text/plain")
        if answer.status == 200 and int(json.loads(answer.body)["n"]) == STEPS:
            return
        time.sleep(0.1)
    raise AssertionError("the collector did not store its verdicts")


class Terminal:
    """`moetrace top` on a pseudo-terminal."""

    def __init__(self, *arguments: str, rows: int, columns: int) -> None:
        self.master, slave = pty.openpty()
        self.resize(rows, columns, signalled=False)
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moetrace_collectors.cli", "top", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment(), "TERM": "xterm-256color", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        self.slave = slave
        self.text = b""

    def resize(self, rows: int, columns: int, *, signalled: bool = True) -> None:
        """Change the size, and tell the process as a terminal does."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if signalled:
            self.process.send_signal(signal.SIGWINCH)

    def read_until(self, wanted: bytes) -> bytes:
        """Everything written until `wanted` appears; what was written before the call does not count."""
        start = len(self.text)
        deadline = time.monotonic() + PATIENCE_S
        while wanted not in self.text[start:]:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, (wanted, self.text[-2000:])
            self.text += os.read(self.master, 65536)
        return self.text[start:]

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self.master, keys)


@contextmanager
def terminal(*arguments: str, rows: int = 30, columns: int = 100) -> Iterator[Terminal]:
    """A running one; killed at the end if it still lives."""
    shown = Terminal(*arguments, rows=rows, columns=columns)
    try:
        yield shown
    finally:
        if shown.process.poll() is None:
            shown.process.kill()
        shown.process.wait()
        os.close(shown.master)
        os.close(shown.slave)


def test_once_prints_one_plain_frame(process: CollectorProcess) -> None:
    """For scripts: names the slow rank, no escape sequence, exit code 0."""
    done = moetrace("top", "--url", process.http_address, "--once", "--steps", "10")
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    assert "live 4 ranks, train, last 10 joined steps, newest 29" in text
    assert "Rank 2 in expert_gemm (mostly layer 1) extended 100 % of steps by a median 2.2" in text
    assert f"{STEPS * 4} rank steps received, {STEPS * 4} joined, 0 pending" in text
    assert "\x1b" not in done.stdout


def test_a_run_directory_with_a_living_collector_is_read_through_it(process: CollectorProcess) -> None:
    """--dir asks the collector that owns the store, and says the same."""
    done = moetrace("top", "--dir", str(process.directory), "--once")
    assert done.returncode == 0, done.stderr
    assert "Rank 2 in expert_gemm (mostly layer 1)" in done.stdout


def test_without_a_terminal_each_step_is_a_line(process: CollectorProcess) -> None:
    """Piped, it prints a line per step and none twice; Ctrl-C ends it with exit code 0."""
    arguments = ["top", "--url", process.http_address, "--steps", "5", "--interval", "0.1"]
    with subprocess.Popen(
        [sys.executable, "-m", "moetrace_collectors.cli", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as piped:
        assert piped.stdout is not None
        lines = [piped.stdout.readline().strip() for _ in range(6)]
        assert lines[0] == "run live"
        assert [line.split(",")[0] for line in lines[1:]] == [f"step {step}" for step in range(25, 30)]
        assert "clear, rank 2, expert_gemm, layer 1, cause device, worth 2.2" in lines[1]
        piped.send_signal(signal.SIGINT)
        rest, complaints = piped.communicate(timeout=PATIENCE_S)
        assert (rest, complaints, piped.returncode) == ("", "", 0)


@pytest.mark.parametrize("end", ["q", "ctrl-c", "sigterm"])
def test_a_terminal_is_given_back_as_it_was(process: CollectorProcess, end: str) -> None:
    """q, Ctrl-C and SIGTERM end it with exit code 0, leave the second screen and restore the line mode."""
    with terminal("--url", process.http_address, "--interval", "0.2") as shown:
        shown.read_until(b"q quits")
        assert SCREEN_ON in shown.text
        assert b"Rank 2 in expert_gemm" in shown.text
        if end == "sigterm":
            shown.process.send_signal(signal.SIGTERM)
        elif end == "ctrl-c":
            shown.process.send_signal(signal.SIGINT)
        else:
            shown.type(b"\x1b[A")  # an arrow key quits nothing
            shown.read_until(b"q quits")
            shown.type(b"q")
        shown.read_until(SCREEN_OFF)
        assert shown.process.wait(PATIENCE_S) == 0
        assert termios.tcgetattr(shown.slave) == shown.before


def test_a_resize_is_followed(process: CollectorProcess) -> None:
    """After a resize the next frame fills the new size: more room shows more steps."""
    with terminal("--url", process.http_address, "--interval", "3600", rows=16, columns=80) as shown:
        first = shown.read_until(b"q quits")
        shown.resize(50, 120)
        second = shown.read_until(b"q quits")
        assert first.count(b"expert_gemm  device") < second.count(b"expert_gemm  device")
        shown.type(b"q")
        assert shown.process.wait(PATIENCE_S) == 0


def test_no_color_is_honoured(process: CollectorProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR the screen has no colour codes."""
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal("--url", process.http_address, "--interval", "3600") as shown:
        text = shown.read_until(b"q quits")
        assert b"\x1b[3" not in text
        assert b"\x1b[1;3" not in text
        shown.type(b"q")
        assert shown.process.wait(PATIENCE_S) == 0


def test_a_collector_that_goes_away_is_told_and_nothing_ends(tmp_path: Path) -> None:
    """The last frame stays, with the reason; before the first step it says what is awaited."""
    with collector(tmp_path / "run") as running:
        empty = moetrace("top", "--url", running.http_address, "--once")
        assert (empty.returncode, empty.stderr) == (0, "")
        assert "Nothing has been joined yet" in empty.stdout
        running.send(request(RUN.step(0)))
        with terminal("--url", running.http_address, "--interval", "0.2", columns=160) as shown:
            shown.read_until(b"q quits")
            running.terminate()
            shown.read_until(b"trying again")
            assert shown.process.poll() is None
            shown.type(b"q")
            assert shown.process.wait(PATIENCE_S) == 0
    # Without a collector nothing new can come: one frame of what the store holds.
    held = moetrace("top", "--dir", str(tmp_path / "run"))
    assert held.returncode == 0
    assert "last 1 joined step, newest 0" in held.stdout
    assert "no collector runs there" in held.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "no collector answers at http://127.0.0.1:1"),
        (["--url", "URL", "--run", "nope"], "holds no joined step of run 'nope': check --run"),
        (["--steps", "0"], "a number from 1 to 1000 expected, got '0'"),
        (["--interval", "x"], "0.1 to 3600 seconds expected, got 'x'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    process: CollectorProcess, arguments: list[str], message: str
) -> None:
    """What is wrong is said before the screen is touched."""
    done = moetrace("top", *(process.http_address if word == "URL" else word for word in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
