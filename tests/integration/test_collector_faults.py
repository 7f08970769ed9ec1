"""A collector that is killed, starved of disk, held up and knocked at: what was acknowledged is stored.

Each fault is repeated a few times here; `make faults` sets the numbers of the environment variables below
to 20 kills and 10,000 connections.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from integration.collector_process import CollectorProcess, collector, environment, rows
from moetrace_collectors.receivers.otlp_grpc import SERVICE
from moetrace_collectors.testing import SyntheticRun, request

NUM_KILLS = int(os.environ.get("MOETRACE_FAULT_KILLS", "2"))
NUM_CONNECTIONS = int(os.environ.get("MOETRACE_FAULT_CONNECTIONS", "1000"))
ENDS = ("CANCELLED", "UNAVAILABLE", "RESOURCE_EXHAUSTED")
RUN = SyntheticRun(run_id="faults", world_size=4, num_layers=2)


def assert_law(process: CollectorProcess) -> None:
    """Every rank step that this process received has one fate; all of one scrape."""
    text = process.get("/metrics").body.decode()
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            base = name.partition("{")[0].removeprefix("moetrace_collector_")
            values[base] = values.get(base, 0.0) + float(value)
    fates = ("joined_total", "late_total", "duplicate_total", "rejected_total", "pending")
    assert values["received_total"] == sum(values[fate] for fate in fates), values


@dataclass
class Senders:
    """One thread per rank that sends its steps in order, each until it is acknowledged."""

    process: CollectorProcess | None = None
    acknowledged: set[tuple[int, int]] = field(default_factory=set)
    stop: threading.Event = field(default_factory=threading.Event)
    progress: threading.Condition = field(default_factory=threading.Condition)

    def send(self, rank: int) -> None:
        """A rank's life."""
        step = 0
        body = request([RUN.step(step)[rank]]).SerializeToString()
        while not self.stop.is_set():
            try:
                done = self.process is not None and self.process.post(body).status == 200
            except OSError:
                done = False
            if not done:
                self.stop.wait(0.02)
                continue
            with self.progress:
                self.acknowledged.add((step, rank))
                self.progress.notify_all()
            step += 1
            body = request([RUN.step(step)[rank]]).SerializeToString()

    def wait_for(self, count: int) -> None:
        """Until so many rank steps are acknowledged."""
        with self.progress:
            assert self.progress.wait_for(lambda: len(self.acknowledged) >= count, 60)


@contextmanager
def sending() -> Iterator[Senders]:
    """Four ranks that send until the block ends."""
    senders = Senders()
    threads = [threading.Thread(target=senders.send, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield senders
    finally:
        senders.stop.set()
        for thread in threads:
            thread.join(60)


def test_kills_at_random_points_under_load_lose_nothing_acknowledged(tmp_path: Path) -> None:
    """SIGKILL again and again while four ranks send: in the end every acknowledged rank step is stored.

    Each step has all its ranks, and the step that spans a kill is complete as every other. Ranks are waited
    for without end here, so that only a loss can make one missing.
    """
    chance = random.Random(7)
    with sending() as senders:
        for _ in range(NUM_KILLS):
            with collector(tmp_path, "--join-timeout-s", "600") as process:
                senders.process = process
                senders.wait_for(len(senders.acknowledged) + chance.randrange(1, 200))
                assert_law(process)
                process.process.kill()
                process.process.wait()
        with collector(tmp_path, "--join-timeout-s", "600") as process:
            senders.process = process
            senders.wait_for(len(senders.acknowledged) + 40)
            senders.stop.set()
            assert_law(process)
            assert process.terminate() == 0
    stored = {(row["step"], row["rank"]) for row in rows(tmp_path, "SELECT step, rank FROM rank_steps FINAL")}
    assert senders.acknowledged <= stored
    last = min(max(step for step, of in senders.acknowledged if of == rank) for rank in range(4))
    verdicts = rows(
        tmp_path, f"SELECT step, closed_by FROM step_verdicts FINAL WHERE step <= {last} ORDER BY step"
    )
    assert [row["step"] for row in verdicts] == list(range(last + 1))
    assert {row["closed_by"] for row in verdicts} == {"complete"}
    events = rows(tmp_path, "SELECT count() AS n FROM collector_events WHERE kind = 'replayed'")
    assert events[0]["n"] >= 1


def test_a_torn_log_is_reported_and_everything_before_it_is_kept(tmp_path: Path) -> None:
    """Garbage behind the last frame: the start works, one line and one event say how much was passed over."""
    with collector(tmp_path, "--join-timeout-s", "600") as process:
        for step in range(5):
            assert process.send(request(RUN.step(step)[:3])).status == 200
        process.process.kill()
        process.process.wait()
    segment = max((tmp_path / "wal").glob("*.wal"))
    with segment.open("ab") as file:
        file.write(b"\x00" * 700)
    with collector(tmp_path, "--join-timeout-s", "600") as process:
        assert process.metric("moetrace_collector_wal_replayed_total") == 5
        assert process.metric("moetrace_collector_wal_damaged_bytes_total") == 700
        for step in range(5):
            assert process.send(request(RUN.step(step)[3:])).status == 200
        process.wait_for("moetrace_collector_joined_total", 20)
        assert_law(process)
        assert process.terminate() == 0
        warnings = [line for line in process.said().splitlines() if "WARNING" in line]
    assert len(warnings) == 1
    assert "700 bytes at 1 places do not read" in warnings[0]
    assert rows(tmp_path, "SELECT closed_by, count() AS n FROM step_verdicts FINAL GROUP BY closed_by") == [
        {"closed_by": "complete", "n": 5}
    ]
    details = rows(tmp_path, "SELECT detail FROM collector_events WHERE kind = 'wal_damaged'")
    assert len(details) == 1
    assert "700 bytes" in str(details[0]["detail"])


def _can_mount() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    done = subprocess.run(
        [unshare, "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return done.returncode == 0


@pytest.mark.skipif(not _can_mount(), reason="needs unshare and a user namespace that may mount a tmpfs")
@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_full_disk_acknowledges_nothing_and_recovers_without_a_restart(
    tmp_path: Path, transport: str
) -> None:
    """The log lies on a tmpfs of 1 MiB that something else fills: 503 / UNAVAILABLE until there is room.

    Every rank step that was acknowledged is stored; of those that were not, none is counted.
    """
    directory, log = tmp_path / "run", tmp_path / "run" / "wal"
    log.mkdir(parents=True)
    script = (
        f'mount -t tmpfs -o size=1m tmpfs "{log}" && exec "{sys.executable}" -m moetrace_collectors.cli '
        f'collect --dir "{directory}" --http-port 0 --grpc-port 0'
    )
    with (
        subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", script], env=environment(), stderr=subprocess.PIPE, text=True
        ) as child,
        collector_note(directory, child) as process,
    ):
        # The mount is visible through the process that has it.
        filler = Path(f"/proc/{child.pid}/root{log}/filler")
        assert process.send(request(RUN.step(0))).status == 200
        fill(filler)
        body = request(RUN.step(1))
        if transport == "http":
            answer = process.send(body)
            assert (answer.status, answer.headers["retry-after"]) == (503, "5")
            assert b"No space left on device" in answer.body
        else:
            with (
                grpc.insecure_channel(process.grpc_address) as channel,
                pytest.raises(grpc.RpcError) as error,
            ):
                TraceServiceStub(channel).Export(body, timeout=10)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "grpc-status-details-bin" in dict(error.value.trailing_metadata())
        assert process.metric("moetrace_collector_unavailable_total") == 1
        assert process.get("/healthz").status == 503
        assert process.metric("moetrace_collector_received_total") == 4
        filler.unlink()
        assert process.send(request(RUN.step(1))).status == 200
        # Not yet on /healthz, which waits until the disk has been calm for a while: see test_refusals.
        process.wait_for("moetrace_collector_joined_total", 8)
        assert_law(process)
        child.terminate()
        assert child.wait(60) == 0
    assert rows(directory, "SELECT DISTINCT step FROM rank_steps FINAL ORDER BY step") == [
        {"step": 0},
        {"step": 1},
    ]


def fill(path: Path) -> None:
    """Write until the disk is full to its last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (65_536, 4_096, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue


@contextmanager
def collector_note(directory: Path, child: subprocess.Popen[str]) -> Iterator[CollectorProcess]:
    """The collector that a child becomes, once its note is there."""
    import json

    deadline = time.monotonic() + 60
    try:
        while not (directory / "collector.json").exists():
            assert child.poll() is None, child.stderr.read() if child.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.02)
        fields = json.loads((directory / "collector.json").read_text())
        yield CollectorProcess(
            process=child,
            directory=directory,
            http_address=fields["http_address"],
            grpc_address=fields["grpc_address"],
        )
    finally:
        if child.poll() is None:
            child.kill()


def address(process: CollectorProcess) -> tuple[str, int]:
    """Host and port of the HTTP receiver."""
    host, _, port = process.http_address.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_slow_clients_do_not_hold_up_the_others(tmp_path: Path) -> None:
    """Forty senders that stop in the middle of their body take nobody's place and cost no count."""
    head = (
        b"POST /v1/traces HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-protobuf\r\n"
        b"Content-Length: 100000\r\n\r\n" + b"x" * 1_000
    )
    with collector(tmp_path) as process:
        slow = [socket.create_connection(address(process), timeout=10) for _ in range(40)]
        for connection in slow:
            connection.sendall(head)
        for step in range(10):
            assert process.send(request(RUN.step(step))).status == 200
        process.wait_for("moetrace_collector_joined_total", 40)
        assert process.metric("moetrace_collector_received_total") == 40
        for connection in slow:
            connection.close()
        assert_law(process)
        assert process.terminate() == 0


def test_clients_that_never_finish_do_not_hold_up_a_stop(tmp_path: Path) -> None:
    """Half a body, a gRPC call without its message, a query without end, an answer that nobody reads.

    All are cut off; what was acknowledged is stored; one line says that it was ready and none that it failed.
    """
    config = tmp_path / "collector.toml"
    config.write_text("query_timeout_s = 600.0\n", encoding="utf-8")
    half = (
        b"POST /v1/traces HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-protobuf\r\n"
        b"Content-Length: 100000\r\n\r\n" + b"x" * 1_000
    )
    endless = b"GET /?query=SELECT+count()+FROM+numbers(1000000000000000)+WHERE+sipHash64(number)=5"
    unread = b"GET /?query=SELECT+number,toString(number)+FROM+numbers(900000)"
    with collector(tmp_path / "run", "--config", str(config)) as process:
        assert process.send(request(RUN.step(0))).status == 200
        open_ends = [socket.create_connection(address(process), timeout=10) for _ in range(30)]
        for connection in open_ends[:24]:
            connection.sendall(half)
        for connection in open_ends[24:27]:
            connection.sendall(endless + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        for connection in open_ends[27:]:
            connection.sendall(unread + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        silent = threading.Event()
        with grpc.insecure_channel(process.grpc_address) as channel:
            export = channel.stream_unary(f"/{SERVICE}/Export")
            calls = [export.future(iter(lambda: silent.wait() and b"", None)) for _ in range(20)]
            open_ends[27].recv(1)
            assert process.terminate() == 0
            silent.set()
            codes = {call.code() for call in calls}
        # Beyond 16 at once gRPC itself says RESOURCE_EXHAUSTED.
        assert codes <= {getattr(grpc.StatusCode, name) for name in ENDS}
        for connection in open_ends:
            connection.close()
        assert [line.partition(": ")[2][:5] for line in process.said().splitlines()] == ["ready"]
    assert rows(tmp_path / "run", "SELECT count() AS n FROM step_verdicts") == [{"n": 1}]


def test_connections_opened_and_dropped_leave_nothing_behind(tmp_path: Path) -> None:
    """Thousands of connections, some with half a request: no descriptor stays, and it still works."""
    with collector(tmp_path) as process:
        assert process.send(request(RUN.step(0))).status == 200
        descriptors = Path(f"/proc/{process.process.pid}/fd")
        threads = Path(f"/proc/{process.process.pid}/task")
        before = len(list(descriptors.iterdir())), len(list(threads.iterdir()))
        ports = [address(process), (address(process)[0], int(process.grpc_address.rpartition(":")[2]))]
        for number in range(NUM_CONNECTIONS):
            with socket.create_connection(ports[number % 2], timeout=10) as connection:
                if number % 3 == 0:
                    connection.sendall(b"POST /v1/traces HTTP/1.1\r\nContent-Le")
        deadline = time.monotonic() + 30
        while len(list(descriptors.iterdir())) > before[0] + 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(list(descriptors.iterdir())) <= before[0] + 5
        assert len(list(threads.iterdir())) <= before[1] + 45
        assert process.send(request(RUN.step(1))).status == 200
        process.wait_for("moetrace_collector_joined_total", 8)
        assert_law(process)
        assert process.terminate() == 0


def num_sockets(process: CollectorProcess) -> int:
    """Sockets that the collector has open; the engine's threads open other files."""
    names = []
    for entry in Path(f"/proc/{process.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            names.append(os.readlink(entry))
    return sum(name.startswith("socket:") for name in names)


def test_readers_that_leave_in_the_middle_leave_nothing_behind(tmp_path: Path) -> None:
    """Forty of them, before, in and after their answer: no thread, no descriptor and no line of log stays."""
    ask = (
        b"GET /?query=SELECT+number,toString(number)+FROM+numbers(200000) HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    with collector(tmp_path) as process:
        assert process.get("/?query=SELECT+1").body == b"1\n"
        threads = Path(f"/proc/{process.process.pid}/task")
        before = num_sockets(process), len(list(threads.iterdir()))
        for number in range(40):
            with socket.create_connection(address(process), timeout=30) as connection:
                connection.sendall(ask)
                if number % 2:
                    connection.recv(1_000)
        deadline = time.monotonic() + 60
        while num_sockets(process) > before[0] + 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert num_sockets(process) <= before[0] + 1
        assert len(list(threads.iterdir())) <= before[1] + 20
        assert process.get("/?query=SELECT+1").body == b"1\n"
        assert process.terminate() == 0
        assert len(process.said().splitlines()) == 1


def test_a_result_is_bounded_by_what_is_written(tmp_path: Path) -> None:
    """The engine counts a column of one value once; a result that it makes larger than allowed is refused."""
    config = tmp_path / "collector.toml"
    config.write_text("query_max_result_bytes = 1000000\n", encoding="utf-8")
    with collector(tmp_path / "run", "--config", str(config)) as process:
        small = process.get("/?query=SELECT+repeat('x',1000)+FROM+numbers(900)")
        assert (small.status, len(small.body)) == (200, 900 * 1_001)
        large = process.get("/?query=SELECT+repeat('x',1000)+FROM+numbers(1000)")
        assert large.status == 413
        assert large.body.decode().count("\n") == 1
        assert "1001000 bytes, at most 1000000" in large.body.decode()


def test_a_grpc_message_beyond_grpcs_own_limit_is_counted(tmp_path: Path) -> None:
    """A message that gRPC refuses by itself shows in the count of calls whose message was never read."""
    file = tmp_path / "collector.toml"
    file.write_text("max_decompressed_bytes = 2_000\nmax_body_bytes = 2_000\n")
    with collector(tmp_path / "run", "--config", str(file)) as process:
        with grpc.insecure_channel(process.grpc_address) as channel:
            stub = TraceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as error:
                stub.Export(request([one for step in range(20) for one in RUN.step(step)]), timeout=10)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            process.wait_for("moetrace_collector_unread_calls_total", 1)
            assert process.metric("moetrace_collector_unread_calls_total") == 1
            with pytest.raises(grpc.RpcError) as error:
                stub.Export(request(RUN.step(0)[:2]), timeout=10)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert process.metric("moetrace_collector_unread_calls_total") == 1
        assert process.metric("moetrace_collector_rejected_total") == 1


def test_without_a_log_nothing_is_written_and_one_that_was_left_behind_is_named(tmp_path: Path) -> None:
    """`--wal off` makes no file, a stop still loses nothing, and an old log is neither read nor forgotten."""
    with collector(tmp_path, "--wal", "off") as process:
        for step in range(3):
            assert process.send(request(RUN.step(step))).status == 200
        assert process.terminate() == 0
    assert not (tmp_path / "wal").exists()
    assert rows(tmp_path, "SELECT count() AS n FROM step_verdicts") == [{"n": 3}]
    with collector(tmp_path) as process:
        assert process.send(request(RUN.step(3)[:2])).status == 200
        process.process.kill()
        process.process.wait()
    with collector(tmp_path, "--wal", "off") as process:
        assert process.terminate() == 0
        assert "wal holds 1 requests that may not be stored" in process.said()
