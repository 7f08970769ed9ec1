"""Bodies are decompressed and parsed within limits, and say what is wrong with them."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors import deflate
from moetrace_collectors.receivers.otlp_body import JSON, PROTOBUF, BodyError, decompress, parse
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas import attributes
from moetrace_schemas.enums import RejectReason

REQUEST = request(SyntheticRun(world_size=1).step(3))


def as_otlp_json() -> dict[str, object]:
    """The request as an OTLP/JSON exporter writes it: hex ids, integers as strings, bytes as base64."""
    span = REQUEST.resource_spans[0].scope_spans[0].spans[0]
    entries = []
    for entry in span.attributes:
        kind = str(entry.value.WhichOneof("value"))
        value: object = getattr(entry.value, kind)
        if kind == "int_value":
            value = str(value)
        if kind == "bytes_value":
            value = base64.b64encode(entry.value.bytes_value).decode()
        first, _, rest = kind.partition("_")
        entries.append({"key": entry.key, "value": {first + rest.capitalize(): value}})
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": [{"key": "host.name", "value": {"stringValue": "host-0"}}]},
                "scopeSpans": [
                    {
                        "spans": [
                            {
                                "traceId": span.trace_id.hex().upper(),
                                "spanId": span.span_id.hex(),
                                "name": span.name,
                                "kind": 1,
                                "startTimeUnixNano": str(span.start_time_unix_nano),
                                "endTimeUnixNano": str(span.end_time_unix_nano),
                                "attributes": entries,
                                "someNewField": {"ignored": True},
                            }
                        ]
                    }
                ],
            }
        ]
    }


def test_json_and_protobuf_give_the_same_request() -> None:
    """OTLP/JSON with hex ids, string integers and base64 bytes is the protobuf request."""
    assert parse(json.dumps(as_otlp_json()).encode(), content_type=JSON) == REQUEST
    assert parse(REQUEST.SerializeToString(), content_type=f"{PROTOBUF}; charset=utf-8") == REQUEST


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        "{",
        '{"resourceSpans": 3}',
        '{"resourceSpans": [3]}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "not hex"}]}]}]}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": 12}]}]}]}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": ["x"]}]}]}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": Infinity}]}]}]}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"kind": 1e999}]}]}]}',
    ],
)
def test_json_that_is_not_otlp_is_malformed(text: str) -> None:
    """Anything but an OTLP document is answered with 400 and counted as malformed."""
    with pytest.raises(BodyError) as error:
        parse(text.encode(), content_type=JSON)
    assert (error.value.status, error.value.reason) == (400, RejectReason.MALFORMED_REQUEST)
    assert "\n" not in str(error.value)


def test_truncated_protobuf_is_malformed() -> None:
    """A cut request is answered with 400."""
    with pytest.raises(BodyError, match="or cut short"):
        parse(REQUEST.SerializeToString()[:-5], content_type=PROTOBUF)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_other_content_types_are_415(content_type: str) -> None:
    """What a browser may send without asking is not taken."""
    with pytest.raises(BodyError) as error:
        parse(b"", content_type=content_type)
    assert error.value.status == 415


@pytest.fixture(params=["zlib", "isal"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What unpacks gzip, whichever is installed."""
    chosen = zlib if request.param == "zlib" else pytest.importorskip("isal.isal_zlib")
    monkeypatch.setattr(deflate, "library", chosen)


@pytest.mark.usefixtures("library")
def test_gzip_in_several_members_is_one_body() -> None:
    """A gzip stream of two members decompresses to both."""
    body = gzip.compress(b"one ") + gzip.compress(b"two")
    assert decompress(body, encoding="gzip", max_bytes=100) == b"one two"


@pytest.mark.usefixtures("library")
def test_a_gzip_bomb_stops_at_the_limit() -> None:
    """A small body that would become huge is refused with 413 without ever being huge in memory."""
    with pytest.raises(BodyError) as error:
        decompress(gzip.compress(b"\0" * 10_000_000), encoding="gzip", max_bytes=1_000)
    assert (error.value.status, error.value.reason) == (413, RejectReason.BODY_TOO_LARGE)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "body", [b"not gzip", gzip.compress(b"x" * 1000)[:-9], gzip.compress(b"x") + b"junk"]
)
def test_broken_gzip_is_malformed(body: bytes) -> None:
    """Gzip that is cut, followed by junk, or none at all is answered with 400."""
    with pytest.raises(BodyError, match="broken gzip"):
        decompress(body, encoding="gzip", max_bytes=10_000)


def test_an_unknown_encoding_is_415() -> None:
    """Only gzip is spoken."""
    with pytest.raises(BodyError, match="'br': gzip or none expected"):
        decompress(b"", encoding="br", max_bytes=10)


@settings(deadline=None)
@given(body=st.binary(max_size=500), content_type=st.sampled_from([JSON, PROTOBUF]))
def test_any_body_parses_or_is_malformed(body: bytes, content_type: str) -> None:
    """No body makes the parser raise anything else."""
    with contextlib.suppress(BodyError):
        parse(body, content_type=content_type)


Document = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["resourceSpans", "scopeSpans", "spans", "attributes", "value", "traceId", "links", "kind"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(document=Document)
def test_any_json_document_parses_or_is_malformed(document: object) -> None:
    """No JSON makes the parser raise anything else, whatever stands where an object belongs."""
    with contextlib.suppress(BodyError):
        parse(json.dumps(document).encode(), content_type=JSON)


def test_the_json_attribute_of_bytes_is_base64() -> None:
    """The packed columns survive OTLP/JSON byte by byte."""
    message = parse(json.dumps(as_otlp_json()).encode(), content_type=JSON)
    span = message.resource_spans[0].scope_spans[0].spans[0]
    block = next(entry for entry in span.attributes if entry.key == attributes.COLUMNS_PHASES)
    assert block.value.bytes_value.startswith(b"MoeT")
