"""Each limit on what one request may hold: refused at the limit, with its reason, before it costs memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from moetrace_collectors import decode as decode_module
from moetrace_collectors.decode import MAX_ATTRIBUTES, MAX_OTHER_BYTES, Decoded, decode
from moetrace_collectors.receivers.otlp_body import (
    JSON,
    MAX_GZIP_MEMBERS,
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    PROTOBUF,
    BodyError,
    decompress,
    parse,
)
from moetrace_collectors.receivers.wire_budget import (
    MAX_MESSAGES,
    TooDeepError,
    TooManyMessagesError,
    WireError,
    check_budget,
)
from moetrace_collectors.testing import SyntheticRun, any_value, request
from moetrace_schemas import attributes, spans
from moetrace_schemas.enums import RejectReason

RUN = SyntheticRun(world_size=1, num_layers=1)


def tagged(field: int, content: bytes) -> bytes:
    """A length-delimited field."""
    size, length = len(content), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((field << 3 | 2, *length, size)) + content


def refused(body: bytes, content_type: str = PROTOBUF, **limits: int) -> tuple[int, RejectReason]:
    """Status and reason of a refused body."""
    with pytest.raises(BodyError) as error:
        parse(body, content_type=content_type, **limits)
    assert "\n" not in str(error.value)
    return error.value.status, error.value.reason


def decoded(change: object) -> Decoded:
    """One rank step, changed before it is decoded."""
    message = request(RUN.step(0))
    change(message.resource_spans[0].scope_spans[0].spans[0])  # type: ignore[operator]
    return decode(message, max_world_size=8)


def reason(change: object) -> RejectReason:
    """Why it is rejected."""
    (rejection,) = decoded(change).rejected
    return rejection.reason


def test_spans_per_request() -> None:
    """One span more than may be is 413 in both encodings; as many as may be are taken."""
    body = request([step for number in range(4) for step in RUN.step(number)]).SerializeToString()
    assert check_budget(body, max_spans=4) == 4
    assert refused(body, max_spans=3) == (413, RejectReason.TOO_MANY_SPANS)
    document = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{}, {}]}]}]}).encode()
    assert len(parse(document, content_type=JSON, max_spans=2).resource_spans) == 1
    assert refused(document, JSON, max_spans=1) == (413, RejectReason.TOO_MANY_SPANS)


@pytest.mark.parametrize("depth", range(4))
def test_empty_messages_are_counted_before_they_are_built(depth: int) -> None:
    """Two bytes each on the wire, hundreds in memory: resources, spans, attributes by the million."""
    inner = {0: b"\x0a\x00", 1: b"\x12\x00", 2: b"\x12\x00", 3: b"\x4a\x00"}[depth] * (MAX_MESSAGES + 1)
    body = (
        inner,
        tagged(1, inner),
        tagged(1, tagged(2, inner)),
        tagged(1, tagged(2, tagged(2, inner))),
    )[depth]
    with pytest.raises(TooManyMessagesError):
        check_budget(body, max_spans=MAX_MESSAGES + 1)
    assert refused(body) == (413, RejectReason.TOO_MANY_SPANS)


def test_empty_values_are_counted_too() -> None:
    """An attribute that is a list of a million nothings, of a span, a resource, an event or a link."""
    values = tagged(2, tagged(5, b"\x0a\x00" * (MAX_MESSAGES + 1)))
    for holder in (
        tagged(1, tagged(1, values)),
        tagged(2, tagged(2, tagged(9, values))),
        tagged(2, tagged(2, tagged(11, tagged(3, values)))),
        tagged(2, tagged(2, tagged(13, tagged(4, values)))),
    ):
        with pytest.raises(TooManyMessagesError):
            check_budget(tagged(1, holder), max_spans=10)


def test_values_nested_deeply() -> None:
    """Lists in lists are refused in protobuf and JSON, whatever a parser would say to them."""
    value = b""
    for _ in range(200):
        value = tagged(5, tagged(1, value))
    body = tagged(1, tagged(2, tagged(2, tagged(9, tagged(2, value)))))
    with pytest.raises(TooDeepError):
        check_budget(body, max_spans=10)
    assert refused(body) == (400, RejectReason.TOO_DEEP)
    nested: object = {"stringValue": "x"}
    for _ in range(MAX_JSON_DEPTH):
        nested = {"arrayValue": {"values": [nested]}}
    span = {"attributes": [{"key": "a", "value": nested}]}
    document = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    assert refused(json.dumps(document).encode(), JSON) == (400, RejectReason.TOO_DEEP)
    assert refused(b"[" * 100_000, JSON) == (400, RejectReason.TOO_DEEP)


@pytest.mark.parametrize("body", [b"\x0a", b"\x0a\x05\x00", b"\x0b", b"\x80" * 11, b"\x09\x00", b"\x0d\x00"])
def test_what_is_no_wire_format_is_malformed(body: bytes) -> None:
    """Cut fields, groups, endless numbers: the walk says so itself and does not stop silently."""
    with pytest.raises(WireError):
        check_budget(body, max_spans=10)
    assert refused(body) == (400, RejectReason.MALFORMED_REQUEST)


def test_json_is_smaller_than_protobuf_may_be() -> None:
    """As objects JSON grows many times over, so its own limit is lower."""
    assert refused(b" " * (MAX_JSON_BYTES + 1), JSON) == (413, RejectReason.BODY_TOO_LARGE)


def test_parts_of_a_gzip_stream() -> None:
    """Many empty parts, each of which costs a copy of the rest, are refused; a few parts are a body."""
    part = gzip.compress(b"")
    assert decompress(part * MAX_GZIP_MEMBERS, encoding="gzip", max_bytes=100) == b""
    with pytest.raises(BodyError, match="more than 16 parts") as error:
        decompress(part * 100_000, encoding="gzip", max_bytes=100)
    assert error.value.reason is RejectReason.MALFORMED_REQUEST


def test_attributes_per_span() -> None:
    """Attributes, events and links together; others' spans are left alone."""

    def add(span: object, number: int) -> None:
        for index in range(number):
            span.attributes.add(key=f"extra.{index}").value.int_value = index  # type: ignore[attr-defined]

    own = len(request(RUN.step(0)).resource_spans[0].scope_spans[0].spans[0].attributes)
    assert decoded(lambda span: add(span, MAX_ATTRIBUTES - own)).rejected == ()
    assert reason(lambda span: add(span, MAX_ATTRIBUTES - own + 1)) is RejectReason.TOO_MANY_ATTRIBUTES
    events, links = [Span.Event()] * MAX_ATTRIBUTES, [Span.Link()] * MAX_ATTRIBUTES
    assert reason(lambda span: span.events.extend(events)) is RejectReason.TOO_MANY_ATTRIBUTES
    assert reason(lambda span: span.links.extend(links)) is RejectReason.TOO_MANY_ATTRIBUTES
    foreign = ExportTraceServiceRequest()
    add(foreign.resource_spans.add().scope_spans.add().spans.add(name="other"), 1_000)
    assert decode(foreign, max_world_size=8).num_foreign_spans == 1


def test_attribute_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no packed column has one limit together; a packed column has its own."""
    huge = AnyValue(string_value="x" * MAX_OTHER_BYTES)
    assert (
        reason(lambda span: span.attributes.add(key="extra", value=huge)) is RejectReason.ATTRIBUTE_TOO_LARGE
    )
    monkeypatch.setattr(decode_module, "MAX_BLOCK_BYTES", 10)
    assert reason(lambda span: None) is RejectReason.ATTRIBUTE_TOO_LARGE


@pytest.mark.parametrize("name", [name for name, kind in attributes.TYPES.items() if kind == "bytes"])
def test_every_packed_column_may_be_larger_than_a_plain_attribute(name: str) -> None:
    """A block of any kind is read as one: what is wrong with it is never that it is large."""

    def enlarge(span: object) -> None:
        kept = [entry for entry in span.attributes if entry.key != name]  # type: ignore[attr-defined]
        del span.attributes[:]  # type: ignore[attr-defined]
        span.attributes.extend(kept)  # type: ignore[attr-defined]
        span.attributes.add(key=name).value.bytes_value = bytes(2 * MAX_OTHER_BYTES)  # type: ignore[attr-defined]

    reasons = {rejection.reason for rejection in decoded(enlarge).rejected}
    assert reasons <= {RejectReason.MALFORMED_COLUMNS}


def test_child_spans_are_held_to_the_same_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One child too large or with too many attributes, or all of them too large, rejects their step."""

    def rejected(change: Callable[[Span], object]) -> tuple[RejectReason, str]:
        message = request(RUN.step(0))
        found = message.resource_spans[0].scope_spans[0].spans
        step = found[0]
        kept = [entry for entry in step.attributes if entry.key != attributes.COLUMNS_PHASES]
        del step.attributes[:]
        step.attributes.extend(kept)
        child = found.add(
            name=spans.MOE_PHASE,
            trace_id=step.trace_id,
            parent_span_id=step.span_id,
            start_time_unix_nano=step.start_time_unix_nano,
            end_time_unix_nano=step.end_time_unix_nano,
        )
        child.attributes.add(key=attributes.PHASE).value.string_value = "router"
        child.attributes.add(key=attributes.LAYER_INDEX).value.int_value = 0
        change(child)
        answer = decode(message, max_world_size=8)
        assert (answer.rank_steps, answer.num_foreign_spans) == ((), 0)
        (rejection,) = answer.rejected
        return rejection.reason, rejection.detail

    links = [Span.Link()] * MAX_ATTRIBUTES
    assert rejected(lambda child: child.links.extend(links)) == (
        RejectReason.TOO_MANY_ATTRIBUTES,
        "moe.phase span: 130 attributes, events and links, at most 128 are taken",
    )
    huge = AnyValue(string_value="x" * MAX_OTHER_BYTES)
    why, detail = rejected(lambda child: child.attributes.add(key="extra", value=huge))
    assert why is RejectReason.ATTRIBUTE_TOO_LARGE
    assert detail.startswith("moe.phase span: ")
    packed = AnyValue(bytes_value=b"x" * MAX_OTHER_BYTES)
    column = attributes.COLUMNS_EXPERTS
    why, _ = rejected(lambda child: child.attributes.add(key=column, value=packed))
    assert why is RejectReason.ATTRIBUTE_TOO_LARGE
    monkeypatch.setattr(decode_module, "MAX_BLOCK_BYTES", 10)
    monkeypatch.setattr(decode_module, "_BLOCKS", ())
    why, detail = rejected(lambda child: None)
    assert why is RejectReason.ATTRIBUTE_TOO_LARGE
    assert detail.startswith("1 moe.phase spans of ")


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\nb", "a\x00b", "a\u202eb", "a\u2028b"])
@pytest.mark.parametrize("name", [attributes.MODEL_NAME, attributes.MODEL_VERSION, attributes.COHORT])
def test_labels_hold_no_control_characters(name: str, text: str) -> None:
    """What becomes a label, a column and a line on a terminal is printable; other alphabets are."""

    def change(span: object, value: str) -> None:
        # The last one of a key holds.
        span.attributes.add(key=name, value=any_value(value))  # type: ignore[attr-defined]

    (rejection,) = decoded(lambda span: change(span, text)).rejected
    assert rejection.reason is RejectReason.INVALID_ATTRIBUTE
    assert rejection.detail.isprintable()
    assert decoded(lambda span: change(span, "\u6a21\u578b 7b (\u00e9)")).rejected == ()


@pytest.mark.parametrize("run_id", ["", "a b", "a/b", "../x", "a\n", "x" * 129, "'; DROP TABLE x"])
def test_run_ids_are_plain(run_id: str) -> None:
    """A run id is a label, a column value and part of file names."""

    def change(span: object) -> None:
        for entry in span.attributes:  # type: ignore[attr-defined]
            if entry.key == attributes.RUN_ID:
                entry.value.CopyFrom(any_value(run_id))

    assert reason(change) is RejectReason.INVALID_ATTRIBUTE


def test_a_host_name_that_is_no_text_is_left_out() -> None:
    """It is a courtesy of the sender: not worth a rank step, and not worth a terminal either."""
    message = request(RUN.step(0))
    for entry in message.resource_spans[0].resource.attributes:
        entry.value.string_value = "host\x1b[2J"
    (step,) = decode(message, max_world_size=8).rank_steps
    assert step.host_name == ""
