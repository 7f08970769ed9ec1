"""What a collector answers is told in the model's process: spans that it rejects, and why it takes none."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTracePartialSuccess

import moetrace
from moetrace_schemas.enums import DropReason

from .otlp_server import Blackhole, FakeCollector, refusing_endpoint


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    """A collector that takes everything unless told otherwise."""
    server = FakeCollector()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """No tracer outlives a test."""
    yield
    moetrace.shutdown(0.1)


def run(endpoint: str, *, steps: int = 3, timeout_s: float = 10.0) -> tuple[bool, moetrace.Tracer]:
    """Record steps of nothing and shut down: whether all was delivered, and the tracer that did it."""
    tracer = moetrace.init(run_id="answers", endpoint=endpoint)
    for _ in range(steps):
        with moetrace.step():
            pass
    return moetrace.shutdown(timeout_s), tracer


def test_steps_that_a_collector_rejects_are_dropped_and_its_words_are_told_once(
    collector: FakeCollector, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that is taken without its spans is no delivery: counted, one warning, shutdown False."""
    collector.rejection = ExportTracePartialSuccess(rejected_spans=2, error_message="first: rank: 9 of 8")
    with caplog.at_level(logging.WARNING):
        delivered, tracer = run(collector.endpoint, steps=3)
    assert not delivered
    assert tracer.metrics.dropped[DropReason.REJECTED] >= 2
    assert tracer.metrics.dropped.total() + tracer.metrics.exported.total() == 3
    said = [message for message in caplog.messages if "first: rank: 9 of 8" in message]
    assert len(said) == 1
    assert collector.endpoint in said[0]


def test_a_placement_that_is_rejected_is_a_loss_and_no_step(
    collector: FakeCollector, caplog: pytest.LogCaptureFixture
) -> None:
    """What is rejected of a request without steps is no step, and shutdown is False all the same."""
    collector.rejection = ExportTracePartialSuccess(rejected_spans=1, error_message="placement: too many")
    tracer = moetrace.init(run_id="answers", endpoint=collector.endpoint)
    moetrace.placement(1, [[0, 1, 2, 3]], ranks=1)
    with caplog.at_level(logging.WARNING):
        assert not moetrace.shutdown(10)
    assert not tracer.metrics.dropped
    assert any("placement: too many" in message for message in caplog.messages)


@pytest.mark.parametrize("body", [b"", b"<html>\xff"], ids=["empty", "no protobuf"])
def test_an_answer_that_is_no_protobuf_rejects_nothing(body: bytes) -> None:
    """Servers that answer 200 with a text of theirs have taken the request."""
    import requests

    from moetrace.emit.exporter import LastAnswer

    answers, response = LastAnswer(), requests.Response()
    response.status_code, response._content = 200, body
    answers.note(response)
    assert answers.take_rejected() == 0


def test_the_endpoint_may_hold_the_path_of_traces(collector: FakeCollector) -> None:
    """An address as other exporters want it is the same address."""
    for tail in ("/v1/traces", "/v1/traces/", "/"):
        delivered, _ = run(collector.endpoint + tail, steps=1)
        assert delivered
    assert set(collector.paths) == {"/v1/traces"}


def warning_of(endpoint: str, caplog: pytest.LogCaptureFixture, **settings: float) -> str:
    """The one line about a collector that takes nothing."""
    with caplog.at_level(logging.WARNING):
        moetrace.init(run_id="answers", endpoint=endpoint, **settings)
        with moetrace.step():
            pass
        assert not moetrace.shutdown(1)
    (said,) = [message for message in caplog.messages if "does not take data" in message]
    return said


def test_a_wrong_path_is_told_with_what_was_answered(
    collector: FakeCollector, caplog: pytest.LogCaptureFixture
) -> None:
    """HTTP 404 and what the endpoint should be."""
    collector.statuses = [404] * 100
    said = warning_of(collector.endpoint + "/collector", caplog)
    assert "HTTP 404" in said
    assert "base URL" in said


@pytest.mark.parametrize("status", [301, 308])
def test_a_collector_that_is_elsewhere_has_taken_nothing(
    collector: FakeCollector, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """An ingress that names another address takes no data: nothing counts as exported, and that is told."""
    collector.statuses, collector.location = [status] * 100, "https://there:4318/v1/traces?key=secret"
    with caplog.at_level(logging.WARNING):
        delivered, tracer = run(collector.endpoint, steps=3, timeout_s=1)
    assert not delivered
    assert not tracer.metrics.exported.total()
    assert tracer.metrics.dropped.total() == 3
    (said,) = [message for message in caplog.messages if "does not take data" in message]
    assert f"HTTP {status}, which names https://there:4318/v1/traces:" in said
    assert "secret" not in said


def test_an_address_where_nobody_listens_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """As refused."""
    assert "the connection is refused" in warning_of(refusing_endpoint(), caplog)


def test_a_name_that_does_not_resolve_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """As the name that it is; a name under .invalid exists nowhere."""
    assert "its name does not resolve" in warning_of("http://collector.invalid:4318", caplog)


def test_a_collector_that_never_answers_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """With the setting that says how long it has."""
    hole = Blackhole()
    try:
        assert "no answer within export_timeout_s" in warning_of(hole.endpoint, caplog, export_timeout_s=0.2)
    finally:
        hole.close()
