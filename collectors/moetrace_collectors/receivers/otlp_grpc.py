"""OTLP over gRPC: TraceService/Export, plain or gzip."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from moetrace_collectors.access.control import AccessControl, Refusal, open_access, token_of
from moetrace_collectors.access.scopes import Scope
from moetrace_collectors.access.tls import ServerTls
from moetrace_collectors.errors import UsageError
from moetrace_collectors.receivers.handler import (
    NotDurableError,
    OverloadedError,
    TraceHandler,
    Wire,
    response,
)
from moetrace_collectors.receivers.listening import why_not
from moetrace_collectors.receivers.otlp_body import BodyError, parse_protobuf, too_large
from moetrace_collectors.receivers.wire_budget import MAX_SPANS
from moetrace_schemas.enums import RefuseReason

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
MAX_CONCURRENT = 16
"""Calls at once; gRPC itself answers RESOURCE_EXHAUSTED to more. A thread each: they share one fsync."""
IDLE_CONNECTION_MS = 300_000
"""A connection without a call for so long is closed; a sender opens a new one by itself."""
MAX_METADATA_BYTES = 16_384
END_S = 5.0
"""For calls that are cut off at a stop to find their end, seconds."""


class OtlpGrpcReceiver:
    """A gRPC server of its own threads."""

    def __init__(
        self,
        handler: TraceHandler,
        *,
        host: str,
        port: int,
        max_message_bytes: int,
        on_unread: Callable[[], None] = lambda: None,
        max_spans: int = MAX_SPANS,
        control: AccessControl | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """Bind; nothing is received before `start`.

        Args:
            handler: takes what comes.
            host: address to listen on.
            port: 0 for any free one.
            max_message_bytes: after decompression.
            on_unread: told of every call that ended before its message was read.
            max_spans: of one request.
            control: who may send, and how often; everybody by default.
            tls: the server's certificate; plain by default.

        Raises:
            UsageError: the port is taken, or the host is not an address of this machine.
        """
        self._handler = handler
        self._max_message_bytes = max_message_bytes
        self._call = threading.local()
        self._max_spans = max_spans
        self._control = control or open_access()
        self._pool = _CallPool(self._call, on_unread)
        self._server = grpc.server(
            self._pool,
            interceptors=[_TokenInterceptor(self._control, self._call)],
            options=[
                # Beyond this gRPC refuses by itself and tells us only that the call has ended, so it lies
                # above our own limit.
                ("grpc.max_receive_message_length", min(2 * max_message_bytes, 2**31 - 1)),
                # Two collectors on one port would share its calls instead of one failing.
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", MAX_CONCURRENT),
                ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS),
                ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ],
            maximum_concurrent_rpcs=MAX_CONCURRENT,
        )
        # Raw bytes instead of the generated servicer: a message that does not parse is ours to count.
        export = grpc.unary_unary_rpc_method_handler(self._export)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Export": export}),)
        )
        address = f"[{host}]" if ":" in host else host
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(f"{address}:{port}")
            else:
                self.port = self._server.add_secure_port(f"{address}:{port}", tls.grpc_credentials())
        except RuntimeError as error:
            # gRPC says that it failed, and not why.
            reason = why_not(host, port, purpose="gRPC", port_flag="--grpc-port")
            raise UsageError(f"{reason}, or --no-grpc" if "--grpc-port" in reason else reason) from error

    def start(self) -> None:
        """Begin to receive."""
        self._server.start()

    def stop(self, *, grace_s: float) -> None:
        """Refuse new calls, let running ones end within `grace_s` seconds."""
        # Calls that are cut off end at once; a handler in the middle of its work cannot be.
        self._server.stop(grace_s).wait(grace_s + END_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _export(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        self._call.is_read = True
        refusal = self._control.check_rate(_peer_host(context.peer()))
        if refusal is not None:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            _set_retry_info(context, code, refusal.message, refusal.retry_after_s)
            _abort(context.abort, code, refusal.message)
        try:
            if len(body) > self._max_message_bytes:
                raise too_large(self._max_message_bytes, "after decompression")
            accepted = self._handler.take(parse_protobuf(body, max_spans=self._max_spans), Wire(body=body))
        except BodyError as error:
            self._handler.refuse(error.reason, str(error), body)
            _abort(context.abort, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OverloadedError as error:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            if isinstance(error, NotDurableError):
                code = grpc.StatusCode.UNAVAILABLE
            _set_retry_info(context, code, str(error), error.retry_after_s)
            _abort(context.abort, code, str(error))
        return response(accepted).SerializeToString()


class _CallPool(futures.ThreadPoolExecutor):
    """Runs the calls, and sees those that end before `_export` has got their message.

    gRPC refuses a message above its own limit, and notices a client that goes away, inside the task that it
    gives to this pool: neither reaches a handler or an interceptor.
    """

    def __init__(self, call: threading.local, on_unread: Callable[[], None]) -> None:
        super().__init__(MAX_CONCURRENT, thread_name_prefix="moetrace-grpc")
        self._call = call
        self._on_unread = on_unread

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """See Executor."""

        def run() -> Any:
            self._call.is_read = False
            try:
                return fn(*args, **kwargs)
            finally:
                if not self._call.is_read:
                    self._on_unread()

        return super().submit(run)


class _TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses a call by its metadata, before its message is read."""

    def __init__(self, control: AccessControl, call: threading.local) -> None:
        self._control = control
        self._call = call

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Go on, or answer no."""
        shown = {name.lower(): value for name, value in reversed(details.invocation_metadata or ())}
        authorization = shown.get("authorization", "")
        refusal = self._control.check_token(
            token_of(authorization if isinstance(authorization, str) else ""), Scope.INGEST
        )
        return continuation(details) if refusal is None else _refusing(refusal, self._call)


def _refusing(refusal: Refusal, call: threading.local) -> Any:
    code = (
        grpc.StatusCode.PERMISSION_DENIED
        if refusal.reason is RefuseReason.MISSING_SCOPE
        else grpc.StatusCode.UNAUTHENTICATED
    )

    def refuse(messages: Any, context: grpc.ServicerContext) -> bytes:
        call.is_read = True  # turned away on purpose: counted as that
        context.abort(code, refusal.message)
        raise AssertionError("abort raises")

    # As a stream of messages, of which none is read.
    return grpc.stream_unary_rpc_method_handler(refuse)


def _peer_host(peer: str) -> str:
    """The address in `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return unquote(rest).rpartition(":")[0].strip("[]")


def _set_retry_info(
    context: grpc.ServicerContext, code: grpc.StatusCode, message: str, retry_after_s: int
) -> None:
    # Without RetryInfo a sender takes RESOURCE_EXHAUSTED for final.
    retry = AnyMessage()
    retry.Pack(RetryInfo(retry_delay=Duration(seconds=retry_after_s)))
    status = Status(code=code.value[0], message=message, details=[retry])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))


def _abort(abort: Callable[[Any, str], Any], code: grpc.StatusCode, message: str) -> None:
    abort(code, message)
    raise AssertionError("abort raises")
