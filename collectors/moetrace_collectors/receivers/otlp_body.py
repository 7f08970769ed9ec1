"""Bytes of a request -> export request: gzip, protobuf and OTLP's own JSON, all with limits. Pure.

OTLP/JSON differs from protobuf's JSON in one point that matters here: trace and span ids are hex. The
rest (64-bit integers as strings, bytes as base64) is as protobuf reads it.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from moetrace_collectors.deflate import DeflateError, unpack_member
from moetrace_collectors.errors import CollectorError
from moetrace_collectors.receivers.wire_budget import (
    MAX_SPANS,
    TooDeepError,
    TooManyMessagesError,
    WireError,
    check_budget,
)
from moetrace_schemas.enums import RejectReason

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
MAX_JSON_BYTES = 8 * 2**20
"""Largest body in JSON: as Python objects it takes up to twenty times its size."""
MAX_JSON_DEPTH = 32
"""Objects and lists in one another. A span's attribute lies 10 deep."""
MAX_GZIP_MEMBERS = 16
"""Parts of one gzip stream: empty ones cost twenty bytes each, and a copy of the rest each."""
_ID_FIELDS = ("traceId", "spanId", "parentSpanId")


class BodyError(CollectorError):
    """A body that holds no export request; `.status` is the HTTP status that says so."""

    def __init__(self, message: str, *, status: int, reason: RejectReason) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


def decompress(body: bytes, *, encoding: str, max_bytes: int) -> bytes:
    """The body without its content encoding, never larger than `max_bytes` in memory.

    Raises:
        BodyError: an unknown encoding, broken gzip, or too large.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise BodyError(
            f"content encoding {encoding!r}: gzip or none expected",
            status=415,
            reason=RejectReason.MALFORMED_REQUEST,
        )
    parts: list[bytes] = []
    size, rest = 0, body
    while rest:
        if len(parts) >= MAX_GZIP_MEMBERS:
            raise _malformed(f"gzip of more than {MAX_GZIP_MEMBERS} parts")
        # One gzip stream may hold several members.
        try:
            member = unpack_member(rest, max_bytes=max_bytes - size + 1)
        except DeflateError as error:
            raise _malformed(f"broken gzip: {error}") from error
        size += len(member.data)
        if size > max_bytes:
            raise too_large(max_bytes, "after gzip")
        if not member.is_whole:
            raise _malformed("broken gzip: it ends in the middle")
        parts.append(member.data)
        rest = member.rest
    return b"".join(parts)


def parse(body: bytes, *, content_type: str, max_spans: int = MAX_SPANS) -> ExportTraceServiceRequest:
    """The export request in a body.

    Raises:
        BodyError: another content type, a body that is not what it says, or more in it than is taken.
    """
    kind = media_type(content_type)
    if kind == PROTOBUF:
        return parse_protobuf(body, max_spans=max_spans)
    if kind == JSON:
        return _parse_json(body, max_spans)
    raise BodyError(
        f"content type {kind!r}: {PROTOBUF} or {JSON} expected",
        status=415,
        reason=RejectReason.MALFORMED_REQUEST,
    )


def media_type(content_type: str) -> str:
    """A content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def parse_protobuf(body: bytes, *, max_spans: int = MAX_SPANS) -> ExportTraceServiceRequest:
    """The export request in protobuf bytes.

    Raises:
        BodyError: not one, or more in it than is taken.
    """
    request = ExportTraceServiceRequest()
    try:
        check_budget(body, max_spans=max_spans)
        request.ParseFromString(body)
    except TooManyMessagesError as error:
        raise _too_many(str(error)) from error
    except TooDeepError as error:
        raise _too_deep(str(error)) from error
    except (WireError, DecodeError) as error:
        raise _malformed("not an ExportTraceServiceRequest in protobuf, or cut short") from error
    return request


def too_large(limit: int, where: str) -> BodyError:
    """The error for a body over a limit of so many bytes."""
    return BodyError(
        f"body is larger than {limit} bytes {where}", status=413, reason=RejectReason.BODY_TOO_LARGE
    )


def _parse_json(body: bytes, max_spans: int) -> ExportTraceServiceRequest:
    if len(body) > MAX_JSON_BYTES:
        raise too_large(MAX_JSON_BYTES, "in JSON; send protobuf")
    try:
        document = json.loads(body)
        if not isinstance(document, dict):
            raise _malformed("JSON object with resourceSpans expected")
        _ids_to_base64(document)
        request = json_format.ParseDict(
            document,
            ExportTraceServiceRequest(),
            ignore_unknown_fields=True,
            max_recursion_depth=MAX_JSON_DEPTH,
        )
    except BodyError:
        raise
    except RecursionError as error:
        raise _too_deep("JSON nested too deep") from error
    except (ValueError, json_format.Error, TypeError, AttributeError, OverflowError) as error:
        # TypeError and AttributeError: a list or a number where an object belongs. OverflowError: Infinity.
        text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        if "Message too deep" in str(error):
            raise _too_deep(f"JSON nested deeper than {MAX_JSON_DEPTH} messages") from error
        raise _malformed(f"not OTLP/JSON: {text}") from error
    if sum(len(scope.spans) for part in request.resource_spans for scope in part.scope_spans) > max_spans:
        raise _too_many(f"more than {max_spans} spans in one request")
    return request


def _ids_to_base64(document: dict[str, Any]) -> None:
    for resource_spans in document.get("resourceSpans") or ():
        for scope_spans in resource_spans.get("scopeSpans") or ():
            for span in scope_spans.get("spans") or ():
                for holder in (span, *(span.get("links") or ())):
                    for name in _ID_FIELDS:
                        if holder.get(name):
                            holder[name] = base64.b64encode(_unhex(name, holder[name])).decode()


def _unhex(name: str, value: object) -> bytes:
    try:
        if not isinstance(value, str):
            raise ValueError("not a string")
        return binascii.unhexlify(value)
    except ValueError as error:
        raise _malformed(f"{name} {str(value)[:40]!r}: hex expected") from error


def _malformed(message: str) -> BodyError:
    return BodyError(message, status=400, reason=RejectReason.MALFORMED_REQUEST)


def _too_many(message: str) -> BodyError:
    return BodyError(f"{message}; send fewer at once", status=413, reason=RejectReason.TOO_MANY_SPANS)


def _too_deep(message: str) -> BodyError:
    return BodyError(message, status=400, reason=RejectReason.TOO_DEEP)
