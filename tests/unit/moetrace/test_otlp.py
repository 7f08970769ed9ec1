"""OTLP emission: what arrives, what is counted when nothing does, and that nobody ever waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import requests
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.emit import otlp
from moetrace.emit.exporter_logs import EXPORTER_LOGGERS
from moetrace.emit.otlp import ATTEMPTS, BATCH, OtlpEmitter
from moetrace.emit.wire import span_attributes
from moetrace.guard import Guard
from moetrace.self_metrics import SelfMetrics
from moetrace_schemas import SCHEMA_VERSION
from moetrace_schemas.enums import DropReason
from moetrace_schemas.identity import span_id, trace_id

from .otlp_server import Blackhole, FakeCollector, refusing_endpoint, wait_until
from .records import CONTEXT, step_record


@dataclass
class Sender:
    """What an emitter reads of its tracer."""

    config: Config
    context: RankContext = CONTEXT
    model_name: str = "olmoe"

    def __post_init__(self) -> None:
        self.guard = Guard()
        self.metrics = SelfMetrics()


class Emitting:
    """An emitter and all that belongs to it."""

    def __init__(self, exporter: SpanExporter | None = None, **settings: Any) -> None:
        settings = {"export_timeout_s": 2.0, "model_version": "r1", "sample": "1/10", **settings}
        self.sender = Sender(Config(**settings))
        self.metrics = self.sender.metrics
        self.emitter = OtlpEmitter(lambda: self.sender, self.metrics, self.sender.config, exporter)

    def emit(self, count: int) -> None:
        """Queue numbered steps."""
        for step in range(count):
            self.emitter.emit(step_record(step))

    def close(self, timeout_s: float = 10.0) -> bool:
        """Close within a time."""
        return self.emitter.close(time.monotonic() + timeout_s)

    def accounted(self) -> int:
        """Records that were exported or dropped."""
        return self.metrics.exported.total() + self.metrics.dropped.total()


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    """A collector that takes everything unless told otherwise."""
    server = FakeCollector()
    yield server
    server.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts are milliseconds."""
    monkeypatch.setattr(otlp, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(otlp, "LONGEST_BACKOFF_S", 0.002)


class ScriptedExporter(SpanExporter):
    """Does what its script says, one entry per call, and then takes everything."""

    def __init__(self, *script: Callable[[], SpanExportResult]) -> None:
        self.script = list(script)
        self.calls: list[list[int]] = []
        self.called = threading.Condition()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """The next entry of the script."""
        step = self.script.pop(0) if self.script else lambda: SpanExportResult.SUCCESS
        with self.called:
            self.calls.append([int(span.attributes["moetrace.step.index"]) for span in spans])  # type: ignore[index,arg-type]
            self.called.notify_all()
        return step()

    def wait_for_calls(self, count: int) -> None:
        """Once it was called that often."""
        with self.called:
            assert self.called.wait_for(lambda: len(self.calls) >= count, 10)


def refuse() -> SpanExportResult:
    """The collector did not take it."""
    return SpanExportResult.FAILURE


def fail() -> SpanExportResult:
    """The transport raised."""
    raise ConnectionError("transport")


# --- what arrives --------------------------------------------------------------------------------


def value_of(any_value: Any) -> Any:
    """An OTLP value as Python's."""
    return getattr(any_value, any_value.WhichOneof("value"))


def test_a_record_arrives_as_one_span_with_derived_ids(collector: FakeCollector) -> None:
    """Trace, span and times are those that every rank and tool derives from run, step and rank."""
    emitting = Emitting(endpoint=collector.endpoint)
    emitting.emitter.emit(step_record(5, microbatch=2))
    (span,) = collector.wait_for(1)
    assert emitting.close()
    trace = trace_id("run-7", 5)
    assert span.name == "moe.step"
    assert span.trace_id == trace.to_bytes(16, "big")
    assert span.span_id == span_id(trace, 3, 2).to_bytes(8, "big")
    assert span.parent_span_id == b""
    assert span.start_time_unix_nano == 1_700_000_000_000_000_000
    assert span.end_time_unix_nano - span.start_time_unix_nano == 100_000


def test_a_spans_attributes_are_those_of_the_wire_contract(collector: FakeCollector) -> None:
    """Types survive protobuf: columns stay bytes, flags stay booleans."""
    emitting = Emitting(endpoint=collector.endpoint)
    record = step_record()
    emitting.emitter.emit(record)
    (span,) = collector.wait_for(1)
    assert emitting.close()
    assert {item.key: value_of(item.value) for item in span.attributes} == span_attributes(
        record, CONTEXT, sample_period=10, model_name="olmoe", model_version="r1"
    )


def test_the_request_says_who_sends_it(collector: FakeCollector) -> None:
    """Resource, scope, path, compression and the configured headers."""
    emitting = Emitting(endpoint=collector.endpoint + "/", headers="authorization=Bearer t0k")
    emitting.emit(1)
    collector.wait_for(1)
    assert emitting.close()
    (resource,) = collector.requests[0].resource_spans
    assert {item.key: item.value.string_value for item in resource.resource.attributes} == {
        "service.name": "moetrace",
        "host.name": "node-1",
        "moetrace.run.id": "run-7",
    }
    (scope,) = resource.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("moetrace", str(SCHEMA_VERSION))
    assert collector.paths == ["/v1/traces"]
    assert collector.headers[0]["authorization"] == "Bearer t0k"
    assert collector.headers[0]["content-encoding"] == "gzip"


def test_the_environment_is_asked_for_proxies_once(
    collector: FakeCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking through the environment costs more than sending: the first answer for an address is kept."""
    asked = []
    original = requests.Session.merge_environment_settings

    def counted(self: requests.Session, url: Any, *others: Any) -> Any:
        asked.append(url)
        return original(self, url, *others)

    monkeypatch.setattr(requests.Session, "merge_environment_settings", counted)
    emitting = Emitting(endpoint=collector.endpoint)
    for requests_before in range(3):
        emitting.emit(1)
        collector.wait_for(requests_before + 1)
    assert emitting.close()
    assert len(collector.requests) == 3
    assert asked == [collector.endpoint + "/v1/traces"]


def test_the_rank_is_read_when_a_record_is_sent(collector: FakeCollector) -> None:
    """An adapter finds the expert-parallel position after the emitter was made."""
    emitting = Emitting(endpoint=collector.endpoint)
    emitting.sender.context = replace(CONTEXT, ep_rank=0, ep_size=2)
    emitting.emit(1)
    (span,) = collector.wait_for(1)
    assert emitting.close()
    values = {item.key: value_of(item.value) for item in span.attributes}
    assert (values["moetrace.ep.rank"], values["moetrace.ep.size"]) == (0, 2)


def test_records_are_sent_in_batches_and_in_order() -> None:
    """What waited during one request goes with the next, oldest first."""
    waiting = threading.Event()

    def slow() -> SpanExportResult:
        waiting.wait(10)
        return SpanExportResult.SUCCESS

    exporter = ScriptedExporter(slow)
    emitting = Emitting(exporter)
    emitting.emitter.emit(step_record(1000))
    exporter.wait_for_calls(1)
    emitting.emit(BATCH + 3)
    waiting.set()
    assert emitting.close()
    assert exporter.calls == [[1000], list(range(BATCH)), list(range(BATCH, BATCH + 3))]
    assert emitting.metrics.exported == {"otlp": BATCH + 4}


# --- a collector that does not take it -----------------------------------------------------------


def test_a_collector_that_is_busy_for_a_while_costs_nothing(collector: FakeCollector) -> None:
    """503 and then 200: every record arrives, once, and none is dropped."""
    collector.statuses = [503] * 4
    emitting = Emitting(endpoint=collector.endpoint)
    emitting.emit(3)
    steps = [
        value_of(item.value)
        for span in collector.wait_for(3)
        for item in span.attributes
        if item.key == "moetrace.step.index"
    ]
    assert emitting.close() is True
    assert steps == [0, 1, 2]
    assert collector.refused == 4
    assert emitting.metrics.exported == {"otlp": 3}
    assert not emitting.metrics.dropped


@pytest.mark.usefixtures("impatient")
def test_a_transport_that_raises_is_a_request_that_was_not_sent() -> None:
    """The batch is tried again, and the thread lives on."""
    exporter = ScriptedExporter(fail, refuse)
    emitting = Emitting(exporter)
    emitting.emit(1)
    exporter.wait_for_calls(3)
    assert emitting.close()
    assert exporter.calls == [[0], [0], [0]]
    assert emitting.metrics.exported == {"otlp": 1}


def test_new_records_do_not_shorten_the_pause_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy model must not burn all attempts of a batch within the first moment of an outage."""
    monkeypatch.setattr(otlp, "FIRST_BACKOFF_S", 60.0)
    exporter = ScriptedExporter(*[refuse] * ATTEMPTS)
    emitting = Emitting(exporter)
    emitting.emitter.emit(step_record(0))
    exporter.wait_for_calls(1)
    emitting.emit(50)
    assert not emitting.emitter._stop.wait(0.2)
    assert len(exporter.calls) == 1
    assert not emitting.metrics.dropped
    emitting.close(timeout_s=0.1)


def test_pauses_between_attempts_double_to_a_longest_one_and_are_jittered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each between a half and one and a half of its length: ranks of one job do not come back at once."""
    exporter = ScriptedExporter(*[refuse] * ATTEMPTS)
    emitting = Emitting(exporter)
    pauses: list[float] = []
    monkeypatch.setattr(emitting.emitter._stop, "wait", pauses.append)
    emitting.emit(1)
    exporter.wait_for_calls(ATTEMPTS)
    wait_until(lambda: emitting.metrics.dropped[DropReason.EXPORT_FAILED] == 1)
    assert emitting.close()
    lengths = [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert len(pauses) == len(lengths) == ATTEMPTS - 1
    parts = [pause / length for pause, length in zip(pauses, lengths, strict=True)]
    assert all(0.5 <= part <= 1.5 for part in parts)
    assert len(set(parts)) == len(parts)


def test_a_request_that_is_too_large_is_sent_in_parts(collector: FakeCollector) -> None:
    """As behind a proxy with a limit of its own: nothing is lost, and what comes later is small at once."""
    collector.too_large = lambda steps: len(steps) > 10
    emitting = Emitting(endpoint=collector.endpoint)
    emitting.emit(BATCH + 8)
    collector.wait_for(BATCH + 8)
    refused = collector.refused
    emitting.emit(BATCH)
    assert emitting.close()
    assert collector.steps() == [*range(BATCH + 8), *range(BATCH)]
    assert collector.refused == refused <= 2
    assert emitting.metrics.exported == {"otlp": 2 * BATCH + 8}
    assert not emitting.metrics.dropped


def test_a_step_that_is_too_large_alone_holds_nothing_up(collector: FakeCollector) -> None:
    """It is dropped at once, and the others of its request arrive."""
    collector.too_large = lambda steps: 5 in steps
    emitting = Emitting(endpoint=collector.endpoint)
    emitting.emit(20)
    collector.wait_for(19)
    assert emitting.close()
    assert collector.steps() == [step for step in range(20) if step != 5]
    assert emitting.metrics.dropped == {DropReason.EXPORT_FAILED: 1}


@pytest.mark.usefixtures("impatient")
def test_a_batch_that_is_refused_for_good_does_not_block_the_next_one() -> None:
    """After its attempts it is dropped for that reason, and what came later is delivered."""
    exporter = ScriptedExporter(*[refuse] * ATTEMPTS)
    emitting = Emitting(exporter)
    emitting.emitter.emit(step_record(0))
    exporter.wait_for_calls(1)
    emitting.emitter.emit(step_record(1))
    exporter.wait_for_calls(ATTEMPTS + 1)
    assert emitting.close()
    assert exporter.calls[-1] == [1]
    assert emitting.metrics.dropped == {DropReason.EXPORT_FAILED: 1}
    assert emitting.metrics.exported == {"otlp": 1}


def test_the_oldest_record_gives_way_when_the_queue_is_full() -> None:
    """What is recent is worth more than what is old; each loss is counted."""
    waiting = threading.Event()

    def slow() -> SpanExportResult:
        waiting.wait(10)
        return SpanExportResult.SUCCESS

    exporter = ScriptedExporter(slow)
    emitting = Emitting(exporter, queue_steps=4)
    emitting.emitter.emit(step_record(1000))
    exporter.wait_for_calls(1)
    emitting.emit(10)
    assert emitting.metrics.queue_steps == 4
    waiting.set()
    assert emitting.close()
    assert exporter.calls == [[1000], [6, 7, 8, 9]]
    assert emitting.metrics.dropped == {DropReason.EXPORT_QUEUE_FULL: 6}
    assert emitting.accounted() == 11


@pytest.fixture(params=["refused", "blackholed"])
def away(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where nobody listens, or nobody answers."""
    if request.param == "refused":
        yield refusing_endpoint()
        return
    hole = Blackhole()
    yield hole.endpoint
    hole.close()


def test_a_collector_that_is_away_is_not_noticed_by_who_emits(
    away: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`emit` returns at once, closing honours its deadline, all is counted, and one line is logged."""
    with caplog.at_level(logging.INFO):
        emitting = Emitting(endpoint=away, export_timeout_s=0.3, queue_steps=50)
        before = time.monotonic()
        emitting.emit(200)
        assert time.monotonic() - before < 1.0
        wait_until(lambda: emitting.emitter._warned)
        before = time.monotonic()
        assert emitting.close(timeout_s=0.5) is False
        assert time.monotonic() - before < 1.5
        emitting.emitter._thread.join(10)
    assert [record.name for record in caplog.records] == ["moetrace"]
    assert caplog.messages[0].startswith(f"moetrace: the collector at {away} does not take data (")
    assert emitting.accounted() == 200
    assert emitting.metrics.exported.total() == 0
    assert emitting.metrics.dropped[DropReason.SHUTDOWN_DEADLINE] >= 50


def test_closing_during_a_hanging_request_returns_at_its_deadline_and_counts_once() -> None:
    """A request in flight is counted as lost by who closes, and not again when it fails."""
    waiting = threading.Event()

    def hang() -> SpanExportResult:
        waiting.wait(10)
        return SpanExportResult.FAILURE

    exporter = ScriptedExporter(*[hang] * ATTEMPTS)
    emitting = Emitting(exporter)
    emitting.emitter.emit(step_record(1000))
    exporter.wait_for_calls(1)
    emitting.emit(3)
    before = time.monotonic()
    assert emitting.close(timeout_s=0.2) is False
    assert time.monotonic() - before < 1.0
    waiting.set()
    emitting.emitter._thread.join(10)
    assert emitting.metrics.dropped == {DropReason.SHUTDOWN_DEADLINE: 4}
    assert emitting.metrics.queue_steps == 0


def test_closing_sends_what_is_queued(collector: FakeCollector) -> None:
    """A healthy collector gets everything before the process ends."""
    emitting = Emitting(endpoint=collector.endpoint)
    emitting.emit(100)
    assert emitting.close() is True
    assert len(collector.spans()) == 100
    assert emitting.metrics.exported == {"otlp": 100}


# --- our own failures ----------------------------------------------------------------------------


def test_a_record_that_the_wire_cannot_hold_does_not_end_the_thread() -> None:
    """It alone is dropped as a fault of ours; those around it are delivered."""
    waiting = threading.Event()

    def slow() -> SpanExportResult:
        waiting.wait(10)
        return SpanExportResult.SUCCESS

    exporter = ScriptedExporter(slow)
    emitting = Emitting(exporter)
    emitting.emitter.emit(step_record(1000))
    exporter.wait_for_calls(1)
    bad = step_record(1)
    phases = tuple(row._replace(ordinal=70_000) for row in bad.phases)
    for record in (step_record(0), replace(bad, phases=phases), step_record(2)):
        emitting.emitter.emit(record)
    waiting.set()
    assert emitting.close()
    assert exporter.calls == [[1000], [0, 2]]
    assert emitting.metrics.exported == {"otlp": 3}
    assert emitting.metrics.dropped == {DropReason.INTERNAL_ERROR: 1}
    assert emitting.sender.guard.errors == {"encode": 1}


def test_the_log_lines_of_the_applications_own_exporters_are_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only our thread is silenced, and only while it lives."""
    exporter = ScriptedExporter()
    emitting = Emitting(exporter)
    emitting.emit(1)
    exporter.wait_for_calls(1)
    for name in EXPORTER_LOGGERS:
        # Each by its name: a command that ran in this process may have made them quiet.
        with caplog.at_level(logging.WARNING, logger=name):
            logging.getLogger(name).warning("of the application")
    assert emitting.close()
    assert caplog.messages == ["of the application"] * len(EXPORTER_LOGGERS)
    assert not any(logging.getLogger(name).filters for name in EXPORTER_LOGGERS)
