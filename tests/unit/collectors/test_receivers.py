"""Both receivers answer an overload so that a sender tries again, and a stop lets running requests end."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from starlette.requests import Request
from starlette.routing import Route

from moetrace_collectors.access.control import AccessControl
from moetrace_collectors.access.rate_limit import RateLimiter
from moetrace_collectors.errors import UsageError
from moetrace_collectors.intake import Intake
from moetrace_collectors.receivers.handler import Accepted, OverloadedError, Wire
from moetrace_collectors.receivers.http_server import HttpServer
from moetrace_collectors.receivers.otlp_grpc import SERVICE, OtlpGrpcReceiver
from moetrace_collectors.receivers.otlp_http import PATH, OtlpHttpReceiver
from moetrace_collectors.receivers.pages import ResultResponse
from moetrace_collectors.request_handler import RequestHandler
from moetrace_collectors.self_metrics import SelfMetrics
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas.enums import RefuseReason, RejectReason

LIMIT = 10**6
BODY = request(SyntheticRun(world_size=1).step(0))


@dataclass
class FakeHandler:
    """Full, or waiting until told."""

    full: bool = False
    entered: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    refused: list[RejectReason] = field(default_factory=list)

    def take(self, message: ExportTraceServiceRequest, wire: Wire | None = None) -> Accepted:
        """Raise, or wait."""
        if self.full:
            raise OverloadedError("the queue is full", retry_after_s=7)
        self.entered.set()
        assert self.go_on.wait(10)
        return Accepted(rejected_spans=0, message="")

    def refuse(self, reason: RejectReason, detail: str, payload: bytes) -> None:
        """Remember."""
        self.refused.append(reason)


@pytest.fixture
def handler() -> FakeHandler:
    """What stands behind the receivers."""
    return FakeHandler()


@pytest.fixture
def http(handler: FakeHandler) -> Iterator[HttpServer]:
    """An HTTP server on a free port."""
    server = HttpServer(host="127.0.0.1", port=0)
    receiver = OtlpHttpReceiver(handler, max_body_bytes=LIMIT, max_decompressed_bytes=LIMIT)
    server.start([], direct={PATH: receiver})
    yield server
    server.stop()
    receiver.close()
    receiver.close()


def post(server: HttpServer, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    message = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/traces",
        data=body,
        headers={"Content-Type": "application/x-protobuf"},
    )
    try:
        with urllib.request.urlopen(message, timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def test_http_says_when_to_come_back(http: HttpServer, handler: FakeHandler) -> None:
    """A full queue is 429 with Retry-After and a status message; nothing is counted as refused."""
    handler.full = True
    status, headers, body = post(http, BODY.SerializeToString())
    assert (status, headers["retry-after"]) == (429, "7")
    assert Status.FromString(body).message == "the queue is full"
    assert handler.refused == []


def test_grpc_says_when_to_come_back(handler: FakeHandler) -> None:
    """A full queue is RESOURCE_EXHAUSTED with RetryInfo, without which a sender would give up."""
    handler.full = True
    receiver = OtlpGrpcReceiver(handler, host="127.0.0.1", port=0, max_message_bytes=LIMIT)
    receiver.start()
    with (
        grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel,
        pytest.raises(grpc.RpcError) as error,
    ):
        TraceServiceStub(channel).Export(BODY, timeout=10)
    receiver.stop(grace_s=0)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = dict(error.value.trailing_metadata())["grpc-status-details-bin"]
    retry = RetryInfo()
    assert Status.FromString(details).details[0].Unpack(retry)
    assert retry.retry_delay.seconds == 7


def test_a_stop_lets_a_running_request_end(http: HttpServer, handler: FakeHandler) -> None:
    """What is being taken when the server stops is answered, so that the sender knows it was taken."""
    answers: list[int] = []
    sender = threading.Thread(target=lambda: answers.append(post(http, BODY.SerializeToString())[0]))
    sender.start()
    assert handler.entered.wait(10)
    stopper = threading.Thread(target=http.stop)
    stopper.start()
    handler.go_on.set()
    stopper.join(10)
    sender.join(10)
    assert answers == [200]


def test_a_stop_waits_for_no_client_and_no_busy_thread(
    handler: FakeHandler, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a body and a request that is being decoded for ever: both cut off, in silence.

    What a thread still does is told to end, and its pool keeps no idle thread.
    """
    of_others = set(threading.enumerate())
    server = HttpServer(host="127.0.0.1", port=0, stop_grace_s=0.2)
    receiver = OtlpHttpReceiver(handler, max_body_bytes=LIMIT, max_decompressed_bytes=LIMIT)
    server.start([], direct={PATH: receiver})
    head = b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"
    whole = BODY.SerializeToString()
    interrupted: list[bool] = []
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as half,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as decoding,
    ):
        half.sendall(head + b"Content-Length: 1000\r\n\r\nabc")
        decoding.sendall(head + b"Content-Length: %d\r\n\r\n" % len(whole) + whole)
        assert handler.entered.wait(10)
        server.stop(interrupt=lambda: interrupted.append(True))
        receiver.close()
        for connection in (half, decoding):
            with suppress(ConnectionResetError):
                assert connection.recv(100) == b""
    assert interrupted == [True]
    assert handler.refused == []
    assert [record for record in caplog.records if record.exc_info] == []
    handler.go_on.set()
    for thread in set(threading.enumerate()) - of_others:
        if thread.name.startswith("moetrace-otlp"):
            thread.join(10)
            assert not thread.is_alive()


def test_an_answer_that_nobody_reads_is_not_kept() -> None:
    """A client that reads nothing is cut off and counted; one that reads gets everything."""
    body = bytes(range(256)) * 2**17
    refused: list[RefuseReason] = []
    counted = threading.Event()

    def on_refused(reason: RefuseReason) -> None:
        refused.append(reason)
        counted.set()

    async def result(request: Request) -> ResultResponse:
        return ResultResponse(body)

    server = HttpServer(host="127.0.0.1", port=0, read_timeout_s=0.5)
    control = AccessControl(
        tokens=None,
        limiter=RateLimiter(per_second=0.0, burst=1, clock_ns=lambda: 0),
        on_refused=on_refused,
    )
    server.start([Route("/", result)], control=control)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert counted.wait(30)
        assert refused == [RefuseReason.SLOW_REQUEST]
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=30) as answer:
        assert answer.headers["Content-Length"] == str(len(body))
        assert answer.read() == body
    assert refused == [RefuseReason.SLOW_REQUEST]
    server.stop()


def test_a_grpc_call_without_its_message_does_not_hold_up_a_stop(handler: FakeHandler) -> None:
    """It is cut off after the grace time, and no thread of the pool stays."""
    unread = threading.Event()
    receiver = OtlpGrpcReceiver(
        handler, host="127.0.0.1", port=0, max_message_bytes=LIMIT, on_unread=unread.set
    )
    receiver.start()
    silent = threading.Event()
    with grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel:
        export = channel.stream_unary(f"/{SERVICE}/Export")
        call = export.future(iter(lambda: silent.wait() and b"", None), wait_for_ready=True)
        for _ in range(1_000):
            if any(thread.name.startswith("moetrace-grpc") for thread in threading.enumerate()):
                break
            silent.wait(0.01)
        receiver.stop(grace_s=0)
        assert call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
        silent.set()
    assert unread.wait(10)
    for thread in threading.enumerate():
        if thread.name.startswith("moetrace-grpc"):
            thread.join(10)
            assert not thread.is_alive()


def test_a_taken_port_is_a_usage_error(http: HttpServer, handler: FakeHandler) -> None:
    """Binding fails when made, naming port and flag."""
    with pytest.raises(UsageError, match=rf"cannot listen on 127\.0\.0\.1:{http.port} for HTTP: Address"):
        HttpServer(host="127.0.0.1", port=http.port)
    with pytest.raises(UsageError, match=rf"cannot listen on 127\.0\.0\.1:{http.port} for gRPC.*--grpc-port"):
        OtlpGrpcReceiver(handler, host="127.0.0.1", port=http.port, max_message_bytes=LIMIT)


def test_a_full_intake_is_an_overload_that_leaves_no_trace() -> None:
    """A request that does not fit is throttled: counted as such, and in no other count."""
    intake = Intake(max_requests=1, max_bytes=LIMIT, clock_ns=lambda: 0)
    book = SeriesBook()
    handler = RequestHandler(intake=intake, metrics=SelfMetrics(book), max_world_size=8)
    assert handler.take(BODY) == Accepted(rejected_spans=0, message="")
    with pytest.raises(OverloadedError):
        handler.take(BODY)
    assert (intake.snapshot().received, intake.snapshot().pending) == (1, 1)
    throttled = next(f for f in book.collect() if f.name == "moetrace_collector_throttled")
    assert [sample.value for sample in throttled.samples] == [1.0]
