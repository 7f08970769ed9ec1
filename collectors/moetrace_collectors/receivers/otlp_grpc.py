"""OTLP over gRPC: TraceService/Export, plain or gzip."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from moetrace_collectors.errors import UsageError
from moetrace_collectors.receivers.handler import (
    NotDurableError,
    OverloadedError,
    TraceHandler,
    Wire,
    response,
)
from moetrace_collectors.receivers.otlp_body import BodyError, parse_protobuf, too_large

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
MAX_CONCURRENT = 16
"""Calls at once; gRPC itself answers RESOURCE_EXHAUSTED to more. A thread each: they share one fsync."""


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
    ) -> None:
        """Bind; nothing is received before `start`.

        Args:
            handler: takes what comes.
            host: address to listen on.
            port: 0 for any free one.
            max_message_bytes: after decompression.
            on_unread: told of every call that ended before its message was read.

        Raises:
            UsageError: the port is taken.
        """
        self._handler = handler
        self._max_message_bytes = max_message_bytes
        self._call = threading.local()
        self._server = grpc.server(
            _CallPool(self._call, on_unread),
            options=[
                # Beyond this gRPC refuses by itself and tells us only that the call has ended, so it lies
                # above our own limit.
                ("grpc.max_receive_message_length", min(2 * max_message_bytes, 2**31 - 1)),
                # Two collectors on one port would share its calls instead of one failing.
                ("grpc.so_reuseport", 0),
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
            self.port = self._server.add_insecure_port(f"{address}:{port}")
        except RuntimeError as error:
            raise UsageError(
                f"cannot listen on {host}:{port} for gRPC: the port is taken or not ours; "
                "choose another with --grpc-port (0 = any free one), or --no-grpc"
            ) from error

    def start(self) -> None:
        """Begin to receive."""
        self._server.start()

    def stop(self, *, grace_s: float) -> None:
        """Refuse new calls, let running ones end within `grace_s` seconds."""
        self._server.stop(grace_s).wait()

    def _export(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        self._call.is_read = True
        try:
            if len(body) > self._max_message_bytes:
                raise too_large(self._max_message_bytes, "after decompression")
            accepted = self._handler.take(parse_protobuf(body), Wire(body=body))
        except BodyError as error:
            self._handler.refuse(error.reason, str(error), body)
            _abort(context.abort, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OverloadedError as error:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            if isinstance(error, NotDurableError):
                code = grpc.StatusCode.UNAVAILABLE
            # Without RetryInfo a sender takes RESOURCE_EXHAUSTED for final.
            retry = AnyMessage()
            retry.Pack(RetryInfo(retry_delay=Duration(seconds=error.retry_after_s)))
            status = Status(code=code.value[0], message=str(error), details=[retry])
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
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


def _abort(abort: Callable[[Any, str], Any], code: grpc.StatusCode, message: str) -> None:
    abort(code, message)
    raise AssertionError("abort raises")
