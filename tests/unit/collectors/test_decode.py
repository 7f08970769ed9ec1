"""The decoder takes what ranks send, says what is wrong with the rest, and survives anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from moetrace_collectors.decode import Decoded, decode
from moetrace_collectors.events import Rejection
from moetrace_collectors.model import CoactivationColumns, RankStep, ViolationCount
from moetrace_collectors.receivers.otlp_body import parse
from moetrace_collectors.testing import SyntheticRun, any_value, request, span
from moetrace_schemas import attributes, enums, identity
from moetrace_schemas.columns import COACTIVATION, EXPERTS, PHASES, TRAFFIC, VIOLATIONS, pack
from moetrace_schemas.enums import RejectReason

RUN = SyntheticRun(world_size=4, num_layers=3, num_experts=8)
STEP_ATTRIBUTES = sorted(name for name, carriers in attributes.CARRIERS.items() if "moe.step" in carriers)
FOREIGN = Path(__file__).parents[2] / "data" / "otlp" / "trace.json"


def run_decode(*spans: Span) -> Decoded:
    """Decode spans of one host."""
    resource_spans = ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])
    return decode(ExportTraceServiceRequest(resource_spans=[resource_spans]), max_world_size=1024)


def good_span() -> Span:
    """What rank 1 sends for step 5."""
    return span(RUN.step(5)[1])


def edited(name: str, value: str | bool | int | float | bytes | None) -> Span:
    """A good span with one attribute replaced, or removed for None."""
    message = good_span()
    kept = [entry for entry in message.attributes if entry.key != name]
    del message.attributes[:]
    message.attributes.extend(kept)
    if value is not None:
        message.attributes.add(key=name, value=any_value(value))
    return message


def only_rejection(decoded: Decoded) -> Rejection:
    """The one rejection of a request that holds nothing else."""
    assert (len(decoded.rank_steps), len(decoded.rejected)) == (0, 1)
    return decoded.rejected[0]


def assert_equal(one: RankStep, other: RankStep) -> None:
    """Compare records that hold arrays."""
    for field in dataclasses.fields(RankStep):
        if field.name not in ("phases", "experts", "traffic", "coactivation"):
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    for column in PHASES.columns:
        assert np.array_equal(getattr(one.phases, column.name), getattr(other.phases, column.name))
    assert [(e.layer, e.kind, e.counts.tolist()) for e in one.experts] == [
        (e.layer, e.kind, e.counts.tolist()) for e in other.experts
    ]
    assert [(e.layer, e.phase, e.row_bytes, e.rows.tolist()) for e in one.traffic] == [
        (e.layer, e.phase, e.row_bytes, e.rows.tolist()) for e in other.traffic
    ]


def test_a_rank_step_survives_the_wire() -> None:
    """Every field and array that a rank sends comes out as it went in."""
    sent = tuple(dataclasses.replace(one, tracer_ns=1_000 + one.rank) for one in RUN.step(5))
    decoded = decode(request(sent), max_world_size=1024)
    assert decoded.rejected == ()
    assert decoded.num_foreign_spans == 0
    for one, other in zip(sent, decoded.rank_steps, strict=True):
        assert_equal(one, other)


def test_a_bad_span_does_not_cost_its_neighbours() -> None:
    """A request with one bad span yields the good ones and one rejection that names the sender."""
    decoded = run_decode(good_span(), edited(attributes.CLOCK, "sundial"), span(RUN.step(5)[2]))
    assert [step.rank for step in decoded.rank_steps] == [1, 2]
    rejection = decoded.rejected[0]
    assert (rejection.reason, rejection.run_id, rejection.step, rejection.rank) == (
        RejectReason.INVALID_ATTRIBUTE, "synthetic", 5, 1,
    )  # fmt: skip
    assert rejection.detail == "moetrace.clock is 'sundial': host, cuda or device expected"


@pytest.mark.parametrize("name", attributes.REQUIRED)
def test_a_required_attribute_that_is_missing_is_named(name: str) -> None:
    """A span without a required attribute is rejected, naming it."""
    rejection = only_rejection(run_decode(edited(name, None)))
    assert rejection.reason is RejectReason.MISSING_ATTRIBUTE
    assert rejection.detail == f"{name} is missing"


@pytest.mark.parametrize("name", STEP_ATTRIBUTES)
def test_an_attribute_of_another_type_is_named(name: str) -> None:
    """A double where the contract has another type is rejected, naming attribute and types."""
    rejection = only_rejection(run_decode(edited(name, 1.5)))
    assert rejection.reason is RejectReason.INVALID_ATTRIBUTE
    assert rejection.detail == f"{name}: {attributes.TYPES[name]} expected, got double"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (attributes.RUN_ID, "no/slashes"),
        (attributes.RUN_ID, ""),
        (attributes.STEP_INDEX, -1),
        (attributes.RANK, 4),
        (attributes.RANK, -1),
        (attributes.WORLD_SIZE, 0),
        (attributes.WORLD_SIZE, 1025),
        (attributes.EP_RANK, 4),
        (attributes.EP_SIZE, 5),
        (attributes.EP_GROUP, 4),
        (attributes.MICROBATCH_INDEX, 65_536),
        (attributes.FORWARD_MODE, "backward"),
        (attributes.SAMPLE_PERIOD, 0),
        (attributes.DURATION_NS, -1),
        (attributes.MODEL_NAME, "x" * 257),
        (attributes.PLACEMENT_VERSION, -1),
    ],
)
def test_a_value_out_of_range_is_rejected(name: str, value: str | int) -> None:
    """A value outside its range is an invalid attribute, and the message names it."""
    rejection = only_rejection(run_decode(edited(name, value)))
    assert rejection.reason is RejectReason.INVALID_ATTRIBUTE
    assert rejection.detail.startswith(f"{name} is ")


@pytest.mark.parametrize("version", [0, 2])
def test_another_schema_version_is_told_apart(version: int) -> None:
    """A newer writer is told to wait for the collector's upgrade, whatever else its span holds."""
    rejection = only_rejection(run_decode(edited(attributes.SCHEMA_VERSION, version)))
    assert rejection.reason is RejectReason.UNSUPPORTED_SCHEMA_VERSION


def test_a_trace_id_of_another_step_is_rejected() -> None:
    """Run id and step give the trace id; a span that says otherwise would be joined to the wrong step."""
    message = good_span()
    message.trace_id = identity.trace_id("synthetic", 6).to_bytes(16, "big")
    assert only_rejection(run_decode(message)).reason is RejectReason.IDENTITY_MISMATCH


def test_a_clock_far_off_is_rejected() -> None:
    """A start in 1970 would make a partition of its own in the store for every such day."""
    message = good_span()
    message.start_time_unix_nano = 1_000
    assert only_rejection(run_decode(message)).reason is RejectReason.INVALID_ATTRIBUTE


def phase_rows(**changes: list[int]) -> bytes:
    """Two phase rows with some columns replaced."""
    columns: dict[str, list[int]] = {column.name: [0, 0] for column in PHASES.columns}
    columns["phase"] = [0, 1]
    columns.update(changes)
    return pack(PHASES, [columns[column.name] for column in PHASES.columns])


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"", "12 header bytes expected, got 0"),
        (b"MoeT", "12 header bytes expected, got 4"),
        (phase_rows()[:-1], "2 rows need 100 bytes, got 99"),
        (phase_rows(phase=[0, 99]), "column phase: unknown code 99, 0 to 10 are known"),
        (phase_rows(direction=[0, 2]), "column direction: unknown code 2, 0 to 1 are known"),
        (phase_rows(layer=[-2, 0]), "column layer: -2 is outside -1 to 32767"),
        (phase_rows(duration_ns=[-5, 0]), "column duration_ns: -5 is outside 0 to 9007199254740992"),
        (
            phase_rows(duration_ns=[2**53, 2**53]),
            "column duration_ns: values add up to more than 9007199254740992",
        ),
        (
            phase_rows(phase=[1, 1]),
            "row 1: layer 0, phase router, ordinal 0 occurs twice; count the ordinal up",
        ),
    ],
)
def test_a_bad_phase_block_says_where(block: bytes, message: str) -> None:
    """A phase block that does not decode is malformed, with place and expectation in one line."""
    rejection = only_rejection(run_decode(edited(attributes.COLUMNS_PHASES, block)))
    assert rejection.reason is RejectReason.MALFORMED_COLUMNS
    assert message in rejection.detail


@pytest.mark.parametrize(
    ("name", "block", "message"),
    [
        (
            attributes.COLUMNS_EXPERTS,
            pack(EXPERTS, [[0], [9], [1]], [3]),
            "column count_kind: unknown code 9, 0 to 8 are known",
        ),
        (
            attributes.COLUMNS_EXPERTS,
            pack(EXPERTS, [[0], [0], [2]], [3, -1]),
            "column values: -1 is outside 0 to 1099511627776",
        ),
        (
            attributes.COLUMNS_EXPERTS,
            pack(EXPERTS, [[0], [0], [0]], []),
            "block kind 2: a row without values; leave the row out",
        ),
        (
            attributes.COLUMNS_EXPERTS,
            pack(EXPERTS, [[0], [2], [2]], [3, 1]),
            "counts of layer 0, kind invalid: one total expected, got 2 values",
        ),
        (
            attributes.COLUMNS_TRAFFIC,
            pack(TRAFFIC, [[0], [3], [16], [3]], [1, 2, 3]),
            "traffic of layer 0, phase dispatch: one value per expert-parallel rank (4) expected, got 3",
        ),
        (
            attributes.COLUMNS_TRAFFIC,
            pack(TRAFFIC, [[0], [1], [16], [4]], [1, 2, 3, 4]),
            "traffic of layer 0, phase router: phase dispatch or combine expected",
        ),
        (
            attributes.COLUMNS_TRAFFIC,
            pack(TRAFFIC, [[0], [3], [16], [4]], [1, 2, 3, 4]) + b"\0",
            "block kind 3: 4 values of 8 bytes expected after the rows, got 33 bytes",
        ),
    ],
)
def test_a_bad_ragged_block_says_where(name: str, block: bytes, message: str) -> None:
    """A block whose lengths or values do not fit is malformed, with the place in one line."""
    rejection = only_rejection(run_decode(edited(name, block)))
    assert rejection.reason is RejectReason.MALFORMED_COLUMNS
    assert rejection.detail == message


def test_rows_come_out_in_order_of_start() -> None:
    """Rows that a writer sent out of order are put in order of start, on which local work depends."""
    block = phase_rows(start_offset_ns=[50, 10])
    decoded = run_decode(edited(attributes.COLUMNS_PHASES, block))
    assert decoded.rank_steps[0].phases.start_offset_ns.tolist() == [10, 50]
    assert decoded.rank_steps[0].phases.phase.tolist() == [1, 0]


def test_counts_that_a_writer_split_are_summed() -> None:
    """Two rows of one (layer, kind) would replace each other in the store, so they are added up."""
    block = pack(EXPERTS, [[0, 0], [0, 0], [2, 2]], [1, 2, 10, 20])
    decoded = run_decode(edited(attributes.COLUMNS_EXPERTS, block))
    assert [entry.counts.tolist() for entry in decoded.rank_steps[0].experts] == [[11, 22]]


def test_receipts_pairs_and_coverage_survive_the_wire() -> None:
    """What ranks send beside counts comes out as it went in; a writer that says nothing of it is read too."""
    pairs = CoactivationColumns(
        layer=np.array([0, 0, 2]),
        span=np.array([0, 1, 0]),
        first=np.array([1, 3, 0]),
        second=np.array([2, 3, 7]),
        count=np.array([5, 1, 9]),
    )
    sent = dataclasses.replace(
        RUN.step(5)[1],
        violations=(ViolationCount(layer=1, violation=4, count=3),),
        coactivation=pairs,
        expected_sites=40,
        seen_sites=39,
        anchor_error_ns=1_234,
    )
    (got,) = decode(request([sent]), max_world_size=1024).rank_steps
    assert_equal(got, sent)
    assert got.coactivation is not None
    for name in ("layer", "span", "first", "second", "count"):
        assert getattr(got.coactivation, name).tolist() == getattr(pairs, name).tolist()
    (plain,) = decode(request([RUN.step(5)[1]]), max_world_size=1024).rank_steps
    assert (plain.violations, plain.coactivation, plain.expected_sites) == ((), None, 0)


@pytest.mark.parametrize(
    ("name", "block", "message"),
    [
        (
            attributes.COLUMNS_VIOLATIONS,
            pack(VIOLATIONS, [[0], [99], [1]]),
            "column violation: unknown code 99, 0 to 6 are known",
        ),
        (
            attributes.COLUMNS_COACTIVATION,
            pack(COACTIVATION, [[0], [2], [0], [1], [1]]),
            "column span: unknown code 2, 0 to 1 are known",
        ),
        (
            attributes.COLUMNS_COACTIVATION,
            pack(COACTIVATION, [[0], [0], [3], [3], [1]]),
            "column second: within a layer the first expert is the smaller one",
        ),
        (
            attributes.COLUMNS_COACTIVATION,
            pack(COACTIVATION, [[0, 0], [1, 1], [3, 3], [3, 3], [1, 1]]),
            "column second: a pair of experts occurs twice; add it up",
        ),
    ],
)
def test_a_bad_receipt_block_says_where(name: str, block: bytes, message: str) -> None:
    """As for other blocks."""
    rejection = only_rejection(run_decode(edited(name, block)))
    assert (rejection.reason, rejection.detail) == (RejectReason.MALFORMED_COLUMNS, message)


def test_foreign_spans_are_counted_and_left_alone() -> None:
    """The OpenTelemetry example trace is accepted: one foreign span, nothing rejected."""
    message = parse(FOREIGN.read_bytes(), content_type="application/json")
    decoded = decode(message, max_world_size=1024)
    assert (decoded.num_foreign_spans, decoded.rank_steps, decoded.rejected) == (1, (), ())


def test_child_spans_with_moetrace_attributes_count_as_foreign() -> None:
    """Spans of other instrumentation that only borrow our attributes are not rank steps."""
    child = Span(name="attention")
    child.attributes.add(key=attributes.RANK, value=any_value(1))
    assert run_decode(child).num_foreign_spans == 1


@pytest.mark.parametrize(
    "codes",
    [
        enums.PHASE_BY_CODE,
        enums.DIRECTION_BY_CODE,
        enums.COUNT_KIND_BY_CODE,
    ],
)
def test_wire_codes_have_no_gaps(codes: dict[int, object]) -> None:
    """The decoder checks codes by their number, which holds while they are numbered from 0 without gaps."""
    assert sorted(codes) == list(range(len(codes)))


GOOD_REQUEST = request(RUN.step(0)[:2]).SerializeToString()


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=2_000))
def test_any_bytes_as_columns_are_taken_or_rejected(data: bytes) -> None:
    """No block of bytes makes the decoder raise."""
    for name in (
        attributes.COLUMNS_PHASES,
        attributes.COLUMNS_EXPERTS,
        attributes.COLUMNS_TRAFFIC,
        attributes.COLUMNS_VIOLATIONS,
        attributes.COLUMNS_COACTIVATION,
    ):
        decoded = run_decode(edited(name, data))
        assert len(decoded.rank_steps) + len(decoded.rejected) == 1


def flip(data: bytes, positions: list[tuple[int, int]]) -> bytes:
    """Data with some bytes replaced."""
    changed = bytearray(data)
    for position, value in positions:
        changed[position % len(changed)] = value
    return bytes(changed)


@settings(max_examples=300, deadline=None)
@given(
    positions=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=20),
    cut=st.integers(0, len(GOOD_REQUEST)),
)
def test_a_damaged_request_is_taken_or_rejected(positions: list[tuple[int, int]], cut: int) -> None:
    """Whatever bytes are flipped and wherever it is cut: parsed or not, the decoder never raises."""
    message = ExportTraceServiceRequest()
    try:
        message.ParseFromString(flip(GOOD_REQUEST, positions)[: cut or None])
    except DecodeError:
        return
    decode(message, max_world_size=1024)


@pytest.mark.parametrize("offset", [1, 3, 7])
def test_columns_may_lie_at_any_offset(offset: int) -> None:
    """An attribute's bytes need not be aligned for int64."""
    padded = memoryview(b"\0" * offset + phase_rows(duration_ns=[7, 8]))[offset:]
    decoded = run_decode(edited(attributes.COLUMNS_PHASES, bytes(padded)))
    assert decoded.rank_steps[0].phases.duration_ns.tolist() == [7, 8]
