"""The processes of a demo run: one collector and N ranks, started, watched and stopped.

Knows the ranks only by their command line (`python -m moetrace.demo.rank`), so that the service never
imports the library or torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetrace_collectors import interrupts
from moetrace_collectors.errors import CollectorError, UsageError
from moetrace_collectors.run_directory import RunDirectory

COLLECTOR_START_S = 60.0
COLLECTOR_STOP_S = 60.0
"""A graceful stop flushes what is pending; it rarely takes more than a second."""


class DemoFailedError(CollectorError):
    """A process of the demo did not do its part; the message says which, and where its log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """What a rank said at its end."""

    rank: int
    sampled: int
    exported: int
    dropped: dict[str, int]


def make_plan(model: str, ranks: int, steps: int, injections: list[str]) -> dict[str, Any]:
    """Ask the model side to check the options.

    Raises:
        UsageError: an option is wrong, in the model side's words.
    """
    command = [sys.executable, "-m", "moetrace.demo.plan", "--model", model, "--ranks", str(ranks)]
    command += ["--steps", str(steps), *[part for text in injections for part in ("--inject", text)]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise UsageError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise DemoFailedError(f"the demo's plan could not be made: {_last_line(done.stderr)}")
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


@dataclass(slots=True)
class CollectorProcess:
    """A collector of its own for one run directory."""

    directory: RunDirectory
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(init=False)

    is_ready: bool = field(init=False, default=False)
    """Whether it has answered."""

    def __post_init__(self) -> None:
        self.log = self.directory.path / "collector.log"

    def start(self, extra: tuple[str, ...] = ()) -> str:
        """Start it and wait until it takes data; returns its HTTP address.

        Raises:
            DemoFailedError: it ended or did not get ready.
        """
        command = [
            sys.executable,
            "-m",
            "moetrace_collectors.cli",
            "collect",
            "--dir",
            str(self.directory.path),
        ]
        command += ["--http-port", "0", "--grpc-port", "0", *extra]
        with self.log.open("wb") as log, interrupts.held():
            # A session of its own: Ctrl-C stops the ranks first, and then this process in order.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        give_up = time.monotonic() + COLLECTOR_START_S
        while time.monotonic() < give_up:
            if self.process.poll() is not None:
                self.process = None
                raise DemoFailedError(f"the collector ended at once: {_tail(self.log)} (log: {self.log})")
            address = self._address()
            if address and _answers(address):
                self.is_ready = True
                return address
            time.sleep(0.05)
        self.stop()
        raise DemoFailedError(f"the collector was not ready in {COLLECTOR_START_S:.0f} s (log: {self.log})")

    def _address(self) -> str | None:
        if not self.directory.owner_path.exists():
            return None
        owner = self.directory.live_owner()
        return owner.http_address if owner is not None else None

    def stop(self) -> None:
        """Stop gracefully: what has arrived is joined and stored first.

        Raises:
            DemoFailedError: it did not stop in time, or not cleanly.
        """
        process = self.process
        if process is None:
            return
        if process.poll() is not None:
            raise DemoFailedError(
                f"the collector {ending(process.returncode)} during the run: what came after is not stored "
                f"(log: {self.log})"
            )
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(COLLECTOR_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise DemoFailedError(
                f"the collector did not stop in {COLLECTOR_STOP_S:.0f} s (log: {self.log})"
            ) from None
        if code == -signal.SIGTERM and not self.is_ready:
            return  # interrupted while it was starting: it had nothing to store yet
        if code:
            raise DemoFailedError(
                f"the collector stopped with code {code}: {_tail(self.log)} (log: {self.log})"
            )


class RankProcesses:
    """The ranks of one run."""

    def __init__(
        self, directory: Path, plan: dict[str, Any], *, run_id: str, endpoint: str, sample: str
    ) -> None:
        self._directory = directory
        self._ranks: int = plan["ranks"]
        self._steps: int = plan["steps"]
        plan_path = directory / "plan.json"
        plan_path.write_text(json.dumps(plan))
        # torch reads a file:// address, which has no relative form.
        rendezvous = directory.resolve() / "rendezvous"
        rendezvous.unlink(missing_ok=True)
        self._command = [sys.executable, "-m", "moetrace.demo.rank", "--plan", str(plan_path)]
        self._command += ["--rendezvous", str(rendezvous), "--run-id", run_id, "--endpoint", endpoint]
        self._command += ["--sample", sample]
        self._processes: list[subprocess.Popen[str]] = []
        self._outcomes: dict[int, RankOutcome] = {}
        self._readers: list[threading.Thread] = []

    def run(self, progress: Callable[[int], None]) -> list[RankOutcome]:
        """Run all ranks to their end; `progress(steps)` is told the slowest rank's finished steps.

        Raises:
            DemoFailedError: a rank failed; the others are stopped.
        """
        done = [0] * self._ranks
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # A user's MOETRACE_ variables are for their own runs, not for this one.
        environment = {k: v for k, v in environment.items() if not k.startswith("MOETRACE_")}
        try:
            for rank in range(self._ranks):
                self._start(rank, environment, done)
            self._watch(done, progress)
        finally:
            self._stop_all()
        return [self._outcomes[rank] for rank in sorted(self._outcomes)]

    def _start(self, rank: int, environment: dict[str, str], done: list[int]) -> None:
        with self._log(rank).open("w") as log, interrupts.held():
            process = subprocess.Popen(
                [*self._command, "--rank", str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
            self._processes.append(process)
        reader = threading.Thread(target=self._read, args=(rank, process, done), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, rank: int, process: subprocess.Popen[str], done: list[int]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.strip()
            if text.isdigit():
                done[rank] = int(text)
            elif text.startswith("{"):
                said = json.loads(text)
                self._outcomes[rank] = RankOutcome(
                    rank=rank, sampled=said["sampled"], exported=said["exported"], dropped=said["dropped"]
                )

    def _watch(self, done: list[int], progress: Callable[[int], None]) -> None:
        while any(process.poll() is None for process in self._processes):
            progress(min(done))
            for rank, process in enumerate(self._processes):
                if process.poll() not in (None, 0):
                    raise DemoFailedError(
                        f"rank {rank} {ending(process.returncode)} after step {done[rank]}"
                        f"{_why(process.returncode, self._log(rank))} (log: {self._log(rank)}); "
                        f"what was joined until then: moetrace report --dir {self._directory}"
                    )
            time.sleep(0.1)
        for reader in self._readers:
            reader.join(5.0)
        failed = [rank for rank, process in enumerate(self._processes) if process.returncode]
        if failed:
            raise DemoFailedError(
                f"rank {failed[0]} failed: {_tail(self._log(failed[0]))} (log: {self._log(failed[0])})"
            )
        progress(min(done))

    def _stop_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _log(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}.log"


def ending(code: int | None) -> str:
    """How a process ended, for people: by its exit code, or by a signal."""
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with code {code}"


def _why(code: int | None, log: Path) -> str:
    # A killed process had no chance to say why; its last line is about something else.
    return "" if code is not None and code < 0 else f": {_tail(log)}"


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/healthz", timeout=2.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason given"


def _tail(log: Path) -> str:
    try:
        return _last_line(log.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return "no log"
