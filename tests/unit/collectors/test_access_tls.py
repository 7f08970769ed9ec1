"""TLS and mutual TLS on both transports, bounded connections, and honest reasons where one cannot listen."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import trustme
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from certificates import Certificates, make_certificates, write_pair
from moetrace_collectors.access.client import ClientAccess
from moetrace_collectors.access.control import AccessControl
from moetrace_collectors.access.rate_limit import RateLimiter
from moetrace_collectors.access.tls import ServerTls, TlsFiles
from moetrace_collectors.access.tokens import TokenBook
from moetrace_collectors.errors import UsageError
from moetrace_collectors.receivers.handler import Accepted, Wire
from moetrace_collectors.receivers.http_server import HttpServer
from moetrace_collectors.receivers.otlp_grpc import OtlpGrpcReceiver
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas.enums import RefuseReason, RejectReason

BODY = request(SyntheticRun(world_size=1).step(0))
INGEST, READ = "i" * 32, "r" * 32


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of this module."""
    return make_certificates(tmp_path_factory.mktemp("tls"))


def server_tls(files: Certificates, *, mutual: bool = False) -> ServerTls:
    """TLS of a server, with client certificates or without."""
    return ServerTls(
        TlsFiles(certificate=files.certificate, key=files.key, client_ca=files.ca if mutual else None)
    )


class Refusals(Counter[RefuseReason]):
    """Counts."""

    def control(self, tokens: TokenBook | None = None, limiter: RateLimiter | None = None) -> AccessControl:
        """Access control that counts here."""
        limiter = limiter or RateLimiter(per_second=0.0, burst=1, clock_ns=lambda: 0)
        return AccessControl(tokens=tokens, limiter=limiter, on_refused=lambda reason: self.update([reason]))


@contextmanager
def http(
    refused: Refusals | None = None, *, answers_after_s: float = 0.0, **options: object
) -> Iterator[HttpServer]:
    """A server with one page, read once the body is there, and another that never answers."""

    async def later(request: Request) -> PlainTextResponse:
        await request.body()
        await asyncio.sleep(answers_after_s)
        return PlainTextResponse("in")

    async def early(request: Request) -> PlainTextResponse:
        return PlainTextResponse("in")

    async def held(request: Request) -> PlainTextResponse:
        await asyncio.Event().wait()
        raise AssertionError

    # An empty count is false.
    refused = Refusals() if refused is None else refused
    server = HttpServer(host="127.0.0.1", port=0, **options)  # type: ignore[arg-type]
    server.start(
        [
            Route("/", later, methods=["GET", "POST"]),
            Route("/held", held, methods=["POST"]),
            Route("/early", early, methods=["POST"]),
        ],
        control=refused.control(),
    )
    try:
        yield server
    finally:
        server.stop()


def get(server: HttpServer, access: ClientAccess, scheme: str = "https") -> bytes:
    """The page."""
    asked = urllib.request.Request(f"{scheme}://127.0.0.1:{server.port}/")
    return access.fetch(asked, timeout_s=10)


def test_https_is_served_and_its_certificate_is_checked(files: Certificates) -> None:
    """A reader that knows the authority is answered; one that does not stops; plain HTTP gets nothing."""
    with http(tls=server_tls(files)) as server:
        assert get(server, ClientAccess(ca_file=str(files.ca))) == b"in"
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            get(server, ClientAccess())
        with pytest.raises((OSError, ValueError)):
            get(server, ClientAccess(), scheme="http")
        assert get(server, ClientAccess(ca_file=str(files.ca))) == b"in"


def test_old_versions_of_tls_are_not_spoken(files: Certificates) -> None:
    """TLS 1.2 is the oldest."""
    assert server_tls(files).context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_mutual_tls_wants_a_certificate_of_its_authority(files: Certificates) -> None:
    """Without one, or with another authority's, the handshake ends; with one the page is served."""
    with http(tls=server_tls(files, mutual=True)) as server:
        known = ClientAccess(
            ca_file=str(files.ca), certificate=str(files.client_certificate), key=str(files.client_key)
        )
        assert get(server, known) == b"in"
        foreign = ClientAccess(
            ca_file=str(files.ca), certificate=str(files.foreign_certificate), key=str(files.foreign_key)
        )
        for stranger in (ClientAccess(ca_file=str(files.ca)), foreign):
            with pytest.raises(OSError):
                get(server, stranger)
        assert get(server, known) == b"in"


def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(tmp_path: Path) -> None:
    """New handshakes get the renewed certificate, over HTTP and gRPC; a half-written pair changes nothing."""
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    certificate, key = write_pair(authority, tmp_path, "server", "127.0.0.1")
    tls = ServerTls(TlsFiles(certificate=certificate, key=key))
    receiver = OtlpGrpcReceiver(Taking(), host="127.0.0.1", port=0, max_message_bytes=10**6, tls=tls)
    receiver.start()
    with http(tls=tls) as server:
        before = [shown(server.port), shown(receiver.port)]
        assert before[0] == before[1]
        key.write_text("not a key")
        assert not tls.refresh()
        assert [shown(server.port), shown(receiver.port)] == before
        write_pair(authority, tmp_path, "server", "127.0.0.1")
        assert tls.refresh()
        after = [shown(server.port), shown(receiver.port)]
        assert after[0] == after[1] != before[0]
    receiver.stop(grace_s=0)


def shown(port: int) -> str:
    """The certificate that a server shows."""
    return ssl.get_server_certificate(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"certificate": "nowhere"}, "tls_certificate = nowhere: cannot be read (No such file or directory)"),
        ({"key": "nowhere"}, "tls_key = nowhere: cannot be read (No such file or directory)"),
        ({"key": "client_key"}, "key values mismatch; a PEM certificate and the PEM key that belongs to it"),
        ({"key": "garbage"}, "a PEM certificate and the PEM key that belongs to it expected"),
        ({"client_ca": "garbage"}, "PEM certificates expected"),
        ({"client_ca": "nowhere"}, "tls_client_ca = nowhere: cannot be read (No such file or directory)"),
        ({"key": "encrypted"}, "tls_key is encrypted: give a key without a password"),
    ],
)
def test_a_wrong_tls_file_is_named(
    files: Certificates, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    """Missing, not PEM, not belonging together, or asking for a password: one line before anything starts."""
    garbage, encrypted = tmp_path / "garbage", tmp_path / "encrypted"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n")
    encrypted.write_bytes(_encrypted(files.key))
    known = {"client_key": files.client_key, "garbage": garbage, "encrypted": encrypted}
    paths = {name: known.get(value, Path(value)) for name, value in change.items()}
    with pytest.raises(UsageError) as error:
        ServerTls(TlsFiles(**{"certificate": files.certificate, "key": files.key, **paths}))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def _encrypted(key: Path) -> bytes:
    from cryptography.hazmat.primitives import serialization

    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    return loaded.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


class Taking:
    """Takes everything."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, message: ExportTraceServiceRequest, wire: Wire | None = None) -> Accepted:
        """Count."""
        self.taken += 1
        return Accepted(rejected_spans=0, message="")

    def refuse(self, reason: RejectReason, detail: str, payload: bytes) -> None:
        """Nothing of the kind is expected here."""
        raise AssertionError(detail)


def export(receiver: OtlpGrpcReceiver, files: Certificates | None, *metadata: tuple[str, str]) -> None:
    """One call, with TLS where files are given."""
    address = f"127.0.0.1:{receiver.port}"
    if files is None:
        channel = grpc.insecure_channel(address)
    else:
        channel = grpc.secure_channel(
            address,
            grpc.ssl_channel_credentials(
                files.ca.read_bytes(), files.client_key.read_bytes(), files.client_certificate.read_bytes()
            ),
        )
    with channel:
        TraceServiceStub(channel).Export(BODY, timeout=10, metadata=metadata)


@pytest.mark.parametrize("mutual", [False, True])
def test_grpc_speaks_tls(files: Certificates, mutual: bool) -> None:
    """With TLS a call is taken, with the client's certificate where it is asked for; a plain one is not."""
    handler = Taking()
    receiver = OtlpGrpcReceiver(
        handler, host="127.0.0.1", port=0, max_message_bytes=10**6, tls=server_tls(files, mutual=mutual)
    )
    receiver.start()
    export(receiver, files)
    with pytest.raises(grpc.RpcError):
        export(receiver, None)
    if mutual:
        ca_only = grpc.secure_channel(
            f"127.0.0.1:{receiver.port}", grpc.ssl_channel_credentials(files.ca.read_bytes())
        )
        with ca_only, pytest.raises(grpc.RpcError):
            TraceServiceStub(ca_only).Export(BODY, timeout=10)
    receiver.stop(grace_s=0)
    assert handler.taken == 1


def test_grpc_wants_a_token_with_scope_ingest() -> None:
    """UNAUTHENTICATED without a known token, PERMISSION_DENIED with another scope's; counted by reason."""
    handler, refused = Taking(), Refusals()
    tokens = TokenBook(file=None, environment=f"ranks ingest {INGEST}\npeople read {READ}")
    receiver = OtlpGrpcReceiver(
        handler, host="127.0.0.1", port=0, max_message_bytes=10**6, control=refused.control(tokens)
    )
    receiver.start()
    export(receiver, None, ("authorization", f"Bearer {INGEST}"))
    for metadata, code in (
        ((), grpc.StatusCode.UNAUTHENTICATED),
        ((("authorization", "Bearer wrong"),), grpc.StatusCode.UNAUTHENTICATED),
        ((("authorization", f"Bearer {READ}"),), grpc.StatusCode.PERMISSION_DENIED),
    ):
        with pytest.raises(grpc.RpcError) as error:
            export(receiver, None, *metadata)
        assert error.value.code() is code
        assert READ not in error.value.details()
    receiver.stop(grace_s=0)
    assert handler.taken == 1
    assert refused == {
        RefuseReason.NO_TOKEN: 1,
        RefuseReason.UNKNOWN_TOKEN: 1,
        RefuseReason.MISSING_SCOPE: 1,
    }


def test_a_grpc_client_that_sends_too_often_waits() -> None:
    """RESOURCE_EXHAUSTED with RetryInfo, counted, and nothing of the call is taken."""
    handler, refused = Taking(), Refusals()
    limiter = RateLimiter(per_second=0.25, burst=1, clock_ns=lambda: 0)
    receiver = OtlpGrpcReceiver(
        handler,
        host="127.0.0.1",
        port=0,
        max_message_bytes=10**6,
        control=refused.control(limiter=limiter),
    )
    receiver.start()
    export(receiver, None)
    with pytest.raises(grpc.RpcError) as error:
        export(receiver, None)
    receiver.stop(grace_s=0)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = RetryInfo()
    assert (
        Status.FromString(dict(error.value.trailing_metadata())["grpc-status-details-bin"])
        .details[0]
        .Unpack(retry)
    )
    assert retry.retry_delay.seconds == 4
    assert (handler.taken, refused) == (1, {RefuseReason.RATE_LIMITED: 1})


def test_connections_are_bounded() -> None:
    """One more than may be is answered 503 and closed, and counted; when one ends another is served."""
    refused = Refusals()
    with http(refused, max_connections=2) as server:
        address = ("127.0.0.1", server.port)
        with (
            socket.create_connection(address, 10) as first,
            socket.create_connection(address, 10) as second,
        ):
            for held in (first, second):
                held.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert _page(held).startswith(b"HTTP/1.1 200")
            with socket.create_connection(address, 10) as more:
                assert _all(more).startswith(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1")
            assert refused == {RefuseReason.TOO_MANY_CONNECTIONS: 1}
            for held in (first, second):
                held.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert _all(held).startswith(b"HTTP/1.1 200")
        with socket.create_connection(address, 10) as again:
            again.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert _all(again).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_a_head_that_does_not_end_is_cut_off(sent: bytes) -> None:
    """A connection that sends nothing, or half a head, is closed and counted; it cannot hold its place."""
    refused = Refusals()
    with http(refused, head_timeout_s=0.05) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as slow:
            slow.sendall(sent)
            assert _all(slow) == b""
        assert refused == {RefuseReason.SLOW_REQUEST: 1}


def test_half_a_second_request_is_cut_off_too() -> None:
    """Keep-alive does not open a way around it."""
    refused = Refusals()
    with http(refused, head_timeout_s=0.05) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert _page(slow).startswith(b"HTTP/1.1 200")
            slow.sendall(b"GET / HT")
            assert _all(slow) == b""
        assert refused == {RefuseReason.SLOW_REQUEST: 1}


@pytest.mark.parametrize(
    "sent", [b"\x00\xff" * 40 + b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"]
)
def test_what_is_not_http_is_answered_and_counted(sent: bytes) -> None:
    """400, one line, counted."""
    refused = Refusals()
    with http(refused) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as odd:
            odd.sendall(sent)
            assert _all(odd).startswith(b"HTTP/1.1 400")
        assert refused == {RefuseReason.NOT_HTTP: 1}


def test_a_head_without_bound_is_refused() -> None:
    """A parser that keeps headers must not be given a gigabyte of them, in many or in one."""
    for endless in (b"X-More: y\r\n", b"y" * 1_000):
        refused = Refusals()
        with http(refused) as server:
            with socket.create_connection(("127.0.0.1", server.port), 10) as odd:
                odd.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-First: ")
                assert _is_stopped(odd, endless)
            assert refused == {RefuseReason.NOT_HTTP: 1}


def test_trailers_without_bound_are_refused() -> None:
    """What follows a chunked body is part of no limit on bodies, and is used by nobody."""
    refused = Refusals()
    with http(refused) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as odd:
            odd.sendall(
                b"POST /held HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
            )
            assert _is_stopped(odd, b"X-More: y\r\n")
        assert refused == {RefuseReason.NOT_HTTP: 1}


def test_small_chunks_and_trailers_are_taken() -> None:
    """The bound is on what nobody sends: a body in chunks of one byte with a trailer passes."""
    refused = Refusals()
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b"x" * 50_000)
    with http(refused) as server, socket.create_connection(("127.0.0.1", server.port), 10) as chunked:
        chunked.sendall(
            b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\n\r\n" + body + b"0\r\nX-Checksum: 1\r\n\r\n"
        )
        assert _all(chunked).startswith(b"HTTP/1.1 200")
    assert not refused


def test_many_requests_on_one_connection_do_not_add_up() -> None:
    """Bounds are of one request: keep-alive connections live for days."""
    refused = Refusals()
    padding = b"X-Padding: " + b"y" * 10_000 + b"\r\n"
    with http(refused) as server, socket.create_connection(("127.0.0.1", server.port), 10) as kept:
        for _ in range(20):
            kept.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + padding + b"\r\n")
            assert _page(kept).startswith(b"HTTP/1.1 200")
    assert not refused


def test_an_answer_that_takes_long_is_not_a_slow_head() -> None:
    """The head's time is over when the head is complete: a query may run for minutes."""
    refused = Refusals()
    with (
        http(refused, head_timeout_s=0.05, answers_after_s=0.3) as server,
        socket.create_connection(("127.0.0.1", server.port), 10) as patient,
    ):
        patient.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert _all(patient).startswith(b"HTTP/1.1 200")
    assert not refused


def test_a_long_head_in_one_piece_is_refused() -> None:
    """The bound holds for a head that is complete when it is first seen."""
    refused = Refusals()
    with http(refused) as server, socket.create_connection(("127.0.0.1", server.port), 10) as odd:
        odd.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"y" * 70_000 + b"\r\n\r\n")
        assert _all(odd).startswith(b"HTTP/1.1 400")
    assert refused == {RefuseReason.NOT_HTTP: 1}


def test_requests_that_wait_for_the_answers_before_theirs_are_bounded() -> None:
    """A few in a row are answered in order; thousands would fill the memory before any is looked at."""
    refused = Refusals()
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with http(refused) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as several:
            several.sendall(request * 9 + request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert _all(several).count(b"HTTP/1.1 200") == 10
        assert not refused
        with socket.create_connection(("127.0.0.1", server.port), 10) as many:
            assert _is_stopped(many, request)
        assert refused == {RefuseReason.NOT_HTTP: 1}


def test_a_connection_outlives_an_answer_that_came_before_the_body_ended() -> None:
    """A sender that was told to wait sends the rest of its body and comes back on the same connection."""
    refused = Refusals()
    head = b"POST /early HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
    with http(refused, head_timeout_s=0.1) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as kept:
            kept.sendall(head + b"x")
            assert _page(kept).startswith(b"HTTP/1.1 200")
            kept.sendall(b"y")
            threading.Event().wait(0.3)
            kept.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert _page(kept).startswith(b"HTTP/1.1 200")
        assert not refused


def _is_stopped(connection: socket.socket, piece: bytes) -> bool:
    """Whether a sender that goes on and on is stopped before 20 MB."""
    try:
        for _ in range(20_000_000 // (100 * len(piece))):
            connection.sendall(piece * 100)
    except OSError:
        return True
    return False


def _page(connection: socket.socket) -> bytes:
    """One answer, on a connection that stays open."""
    got = b""
    while not got.endswith(b"\r\n\r\nin"):
        part = connection.recv(4_096)
        assert part, got
        got += part
    return got


def _all(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(4_096):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_an_address_of_another_machine_is_to_blame_and_not_the_port() -> None:
    """The message names the host, on both transports; a name that does not resolve is named too."""
    for make in (
        lambda: HttpServer(host="192.0.2.1", port=0),
        lambda: OtlpGrpcReceiver(Taking(), host="192.0.2.1", port=0, max_message_bytes=10**6),
    ):
        with pytest.raises(UsageError) as error:
            make()
        assert str(error.value) == (
            "host = '192.0.2.1' is not an address of this machine: give one of its own, or 0.0.0.0 for all"
        )
    with pytest.raises(UsageError, match=r"host = 'no\.such\.host\.invalid': no such address or name"):
        HttpServer(host="no.such.host.invalid", port=0)
