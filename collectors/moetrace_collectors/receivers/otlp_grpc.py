"""OTLP over gRPC: TraceService/Export, plain or gzip."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from moetrace_collectors.errors import UsageError
from moetrace_collectors.receivers.handler import OverloadedError, TraceHandler, response
from moetrace_collectors.receivers.otlp_body import BodyError, parse_protobuf, too_large

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
MAX_WORKERS = 4
MAX_CONCURRENT = 16
"""Calls at once; gRPC itself answers RESOURCE_EXHAUSTED to more."""


class OtlpGrpcReceiver:
    """A gRPC server of its own threads."""

    def __init__(self, handler: TraceHandler, *, host: str, port: int, max_message_bytes: int) -> None:
        """Bind; nothing is received before `start`.

        Raises:
            UsageError: the port is taken.
        """
        self._handler = handler
        self._max_message_bytes = max_message_bytes
        self._server = grpc.server(
            futures.ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="moetrace-grpc"),
            options=[
                # gRPC refuses beyond this before we can count, so it lies above our own limit.
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
        try:
            if len(body) > self._max_message_bytes:
                raise too_large(self._max_message_bytes, "after decompression")
            accepted = self._handler.take(parse_protobuf(body))
        except BodyError as error:
            self._handler.refuse(error.reason, str(error), body)
            _abort(context.abort, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OverloadedError as error:
            # Without RetryInfo a sender takes RESOURCE_EXHAUSTED for final.
            retry = AnyMessage()
            retry.Pack(RetryInfo(retry_delay=Duration(seconds=error.retry_after_s)))
            status = Status(
                code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message=str(error), details=[retry]
            )
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            _abort(context.abort, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return response(accepted).SerializeToString()


def _abort(abort: Callable[[Any, str], Any], code: grpc.StatusCode, message: str) -> None:
    abort(code, message)
    raise AssertionError("abort raises")
