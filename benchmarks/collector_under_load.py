"""A real collector process and senders for it, for the benchmarks of ingest and soak."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from moetrace_collectors.model import PhaseColumns, RankStep
from moetrace_collectors.simulate import SimulatedRun, simulate
from moetrace_collectors.testing import any_value, request
from moetrace_schemas import attributes, spans
from moetrace_schemas.enums import DIRECTION_BY_CODE, PHASE_BY_CODE

LAYERS = 61
_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """A running collector."""

    process: subprocess.Popen[bytes]
    port: int

    def metrics(self) -> dict[tuple[str, str], float]:
        """Values by (name, labels) of one scrape."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        matches = (_SAMPLE.fullmatch(line) for line in text.splitlines())
        return {(m["name"], m["labels"] or ""): float(m["value"]) for m in matches if m}

    def stored_phase_rows(self) -> int:
        """Phase rows that the store has taken."""
        return int(self.metrics().get(("moetrace_collector_stored_rows_total", 'table="phase_spans"'), 0))

    def memory_kib(self, field: str) -> int:
        """VmRSS or VmHWM of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
        assert found is not None
        return int(found[1])

    def cpu_s(self) -> float:
        """CPU seconds that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def collector(directory: Path, *options: str) -> Iterator[Collector]:
    """A collector on free ports with a store of its own."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "moetrace_collectors.cli", "collect", "--dir", str(directory),
            "--http-port", "0", "--no-grpc", *options,
        ]
    )  # fmt: skip
    try:
        note = directory / "collector.json"
        while not note.exists():
            if process.poll() is not None:
                raise SystemExit("the collector did not start; see above")
            time.sleep(0.05)
        port = int(json.loads(note.read_text())["http_address"].rpartition(":")[2])
        yield Collector(process=process, port=port)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def rank_steps(*, num_ranks: int, with_counts: bool) -> tuple[RankStep, ...]:
    """One step of a simulated run, as all its ranks send it."""
    run = SimulatedRun(
        num_ranks=num_ranks,
        num_layers=LAYERS,
        num_experts=256,
        num_tokens=256,
        top_k=8,
        gemm_ns_per_row=300.0,
        num_steps=1,
    )
    step = next(simulate(run)).joined
    if with_counts:
        return step.rank_steps
    return tuple(replace(one, experts=(), traffic=()) for one in step.rank_steps)


def body(steps: Iterable[RankStep], *, compressed: bool) -> bytes:
    """The request as a rank sends it: gzip at the exporter's level (1), or plain."""
    plain = request(steps).SerializeToString()
    return gzip.compress(plain, 1) if compressed else plain


def plain_span_body(steps: Iterable[RankStep]) -> bytes:
    """The same rank steps as instrumentation without packed columns sends them: a child span per row."""
    message = request(steps)
    children: list[Span] = []
    for parent, one in zip(message.resource_spans[0].scope_spans[0].spans, steps, strict=True):
        packed = next(entry for entry in parent.attributes if entry.key == attributes.COLUMNS_PHASES)
        parent.attributes.remove(packed)
        columns = zip(*(getattr(one.phases, name).tolist() for name in PhaseColumns.__slots__), strict=True)
        for number, values in enumerate(columns):
            row = dict(zip(PhaseColumns.__slots__, values, strict=True))
            start = one.start_unix_ns + row["start_offset_ns"]
            named: dict[str, str | int] = {
                attributes.LAYER_INDEX: row["layer"],
                attributes.PHASE: PHASE_BY_CODE[row["phase"]].value,
                attributes.DIRECTION: DIRECTION_BY_CODE[row["direction"]].value,
                attributes.ORDINAL: row["ordinal"],
                attributes.FLAGS: row["flags"],
                attributes.BYTES: row["bytes"],
                attributes.ROWS: row["rows"],
            }
            children.append(
                Span(
                    name=spans.MOE_PHASE,
                    trace_id=parent.trace_id,
                    parent_span_id=parent.span_id,
                    span_id=(number + 1).to_bytes(8, "big"),
                    start_time_unix_nano=start,
                    end_time_unix_nano=start + row["duration_ns"],
                    attributes=[KeyValue(key=key, value=any_value(value)) for key, value in named.items()],
                )
            )
    message.resource_spans[0].scope_spans[0].spans.extend(children)
    return message.SerializeToString()


def numbered(steps: Iterable[RankStep], step: int, run_id: str = "load") -> list[RankStep]:
    """The same rank steps under another step number, a tenth of a second later each."""
    return [
        replace(one, run_id=run_id, step=step, start_unix_ns=one.start_unix_ns + step * 100_000_000)
        for one in steps
    ]


def post_all(port: int, bodies: list[bytes], *, compressed: bool, threads: int = 8) -> float:
    """Send every body until it is acknowledged; seconds until the last one was."""
    ticket = count()
    failures: list[BaseException] = []

    def send() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        headers = {"Content-Type": "application/x-protobuf"}
        if compressed:
            headers["Content-Encoding"] = "gzip"
        try:
            while (number := next(ticket)) < len(bodies):
                while True:
                    connection.request("POST", "/v1/traces", bodies[number], headers)
                    answer = connection.getresponse()
                    answer.read()
                    if answer.status == 200:
                        break
                    if answer.status not in (429, 503):
                        raise SystemExit(f"the collector answered {answer.status}")
                    time.sleep(0.05)
        except BaseException as error:  # noqa: BLE001 - shown by the caller
            failures.append(error)
        finally:
            connection.close()

    senders = [threading.Thread(target=send) for _ in range(threads)]
    start = time.perf_counter()
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - start
