"""OTLP over HTTP: POST /v1/traces in protobuf or JSON, plain or gzip. An ASGI application.

Nearly all requests come here, and all threads of the collector take turns at one interpreter: what a web
framework puts around a request is as much of that as to decode it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from moetrace_collectors.access.scopes import RouteScopes, Scope
from moetrace_collectors.receivers.handler import (
    NotDurableError,
    OverloadedError,
    TraceHandler,
    Wire,
    response,
)
from moetrace_collectors.receivers.otlp_body import (
    JSON,
    PROTOBUF,
    BodyError,
    decompress,
    media_type,
    parse,
    too_large,
)
from moetrace_collectors.receivers.wire_budget import MAX_SPANS
from moetrace_schemas.enums import RejectReason

PATH = "/v1/traces"
SCOPES: RouteScopes = {PATH: Scope.INGEST}
BODY_TIMEOUT_S = 30.0
"""A sender that takes longer to send its body gives its place to others."""
MAX_CONCURRENT = 16
"""Requests decoded at once, and bodies of full size in memory at once. How many are being read is not
bounded by this: a sender that is slow must not take the place of one that is not."""
RETRY_AFTER_S = 1
_GRPC_INVALID_ARGUMENT, _GRPC_UNAVAILABLE = 3, 14


class _DisconnectedError(Exception):
    """The sender went away before its body was complete."""


class OtlpHttpReceiver:
    """Reads, decodes and answers; what a request means is the handler's matter."""

    def __init__(
        self,
        handler: TraceHandler,
        *,
        max_body_bytes: int,
        max_decompressed_bytes: int,
        max_spans: int = MAX_SPANS,
    ) -> None:
        self._handler = handler
        self._max_body_bytes = max_body_bytes
        self._max_decompressed_bytes = max_decompressed_bytes
        self._max_spans = max_spans
        self._places = asyncio.Semaphore(MAX_CONCURRENT)
        # Of its own: to hand a request to a thread costs this pool half of what starlette's costs.
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="moetrace-otlp")
        self._max_held_bytes = MAX_CONCURRENT * max_body_bytes
        self._held_bytes = 0

    def close(self) -> None:
        """Let its threads go; one that is still at work ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["method"] != "POST":
            answer: Response | None = PlainTextResponse(
                "send traces here by POST\n", 405, headers={"Allow": "POST"}
            )
        else:
            answer = await self._export(dict(scope["headers"]), receive)
        if answer is not None:
            await send(
                {"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers}
            )
            await send({"type": "http.response.body", "body": answer.body})

    async def _export(self, headers: dict[bytes, bytes], receive: Receive) -> Response | None:
        content_type = headers.get(b"content-type", b"").decode("latin-1")
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                await self._read(headers, receive, parts)
            async with self._places:
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._take, b"".join(parts), content_type, encoding
                )
        except BodyError as error:
            self._handler.refuse(error.reason, str(error), b"")
            return _answer(_status(_GRPC_INVALID_ARGUMENT, str(error)), content_type, error.status)
        except OverloadedError as error:
            return _come_back(error, content_type)
        except TimeoutError:
            message = f"body not received within {BODY_TIMEOUT_S:g} s"
            self._handler.refuse(RejectReason.MALFORMED_REQUEST, message, b"")
            return _answer(_status(_GRPC_INVALID_ARGUMENT, message), content_type, 408)
        except _DisconnectedError:
            # Nothing was acknowledged, so the sender still has it.
            return None
        finally:
            self._held_bytes -= sum(map(len, parts))

    async def _read(self, headers: dict[bytes, bytes], receive: Receive, parts: list[bytes]) -> None:
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            raise too_large(self._max_body_bytes, "as sent")
        size = 0
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] != "http.request":
                raise _DisconnectedError
            part = message.get("body", b"")
            has_more = message.get("more_body", False)
            size += len(part)
            if size > self._max_body_bytes:
                raise too_large(self._max_body_bytes, "as sent")
            if self._held_bytes + len(part) > self._max_held_bytes:
                raise OverloadedError("too many large requests at once", retry_after_s=RETRY_AFTER_S)
            parts.append(part)
            self._held_bytes += len(part)

    def _take(self, body: bytes, content_type: str, encoding: str) -> Response:
        try:
            plain = decompress(body, encoding=encoding, max_bytes=self._max_decompressed_bytes)
            if len(plain) > self._max_decompressed_bytes:
                raise too_large(self._max_decompressed_bytes, "after decompression")
            # JSON is smaller and faster to read again as protobuf.
            wire = (
                Wire(body=body, is_gzip=encoding == "gzip") if media_type(content_type) == PROTOBUF else None
            )
            accepted = self._handler.take(
                parse(plain, content_type=content_type, max_spans=self._max_spans), wire
            )
        except BodyError as error:
            self._handler.refuse(error.reason, str(error), body)
            return _answer(_status(_GRPC_INVALID_ARGUMENT, str(error)), content_type, error.status)
        return _answer(response(accepted), content_type, 200)


def _come_back(error: OverloadedError, content_type: str) -> Response:
    status = 503 if isinstance(error, NotDurableError) else 429
    answer = _answer(_status(_GRPC_UNAVAILABLE, str(error)), content_type, status)
    answer.headers["Retry-After"] = str(error.retry_after_s)
    return answer


def _status(code: int, message: str) -> Status:
    return Status(code=code, message=message)


def _answer(message: Message, content_type: str, status: int) -> Response:
    """OTLP answers in the request's own encoding; protobuf where the request named neither."""
    if media_type(content_type) == JSON:
        return Response(json_format.MessageToJson(message, indent=None), status, media_type=JSON)
    return Response(message.SerializeToString(), status, media_type=PROTOBUF)
