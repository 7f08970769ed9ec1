"""Placements from the wire: checked once, and a wrong one costs nobody else anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from ledger_builders import SWAPPED, placement_span, report
from moetrace_collectors.decode import Decoded, decode
from moetrace_collectors.testing import SyntheticRun, span
from moetrace_schemas.enums import CountIds, PlacementEvent, RejectReason
from moetrace_schemas.placement import PlacementTerms


def decoded(*found: Span) -> Decoded:
    """What one request of these spans holds."""
    message = ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=list(found))])]
    )
    return decode(message, max_world_size=64)


def judged(comparison: str) -> dict[str, Any]:
    """Attributes of a verdict."""
    return {"PLACEMENT_KIND": "judged", "PLACEMENT_COMPARISON": comparison}


def test_a_verdict_is_read_as_canonical_json() -> None:
    """Only a judged placement holds one; the text is the same however it was spaced."""
    text = '{"verdict": "accepted", "run_id": "run", "rollback_version": null}'
    (got,) = decoded(placement_span(report(3, SWAPPED), **judged(text))).placements
    assert got.event is PlacementEvent.JUDGED
    assert got.comparison == '{"rollback_version":null,"run_id":"run","verdict":"accepted"}'
    (plain,) = decoded(placement_span(report(3, SWAPPED), PLACEMENT_COMPARISON=text)).placements
    assert (plain.event, plain.comparison) == (PlacementEvent.ANNOUNCED, "")


def test_what_is_sent_is_what_is_read() -> None:
    """Map and terms come through whole, beside steps of the same request."""
    told = report(3, SWAPPED, step=5)
    step = span(SyntheticRun(run_id="run").step(5)[0])
    found = decoded(
        placement_span(
            told,
            PLACEMENT_POLICY="p2",
            PLACEMENT_PROPOSER="balancer",
            PLACEMENT_WINDOW_FIRST=0,
            PLACEMENT_WINDOW_LAST=4,
            PLACEMENT_ACCEPT_SLOWDOWN=0.05,
            PLACEMENT_ROLLBACK=1,
            PLACEMENT_COUNTS="physical",
            PLACEMENT_EXPERT_BYTES=7,
            PLACEMENT_WEIGHTS='{"w":"abababab"}',
        ),
        step,
    )
    (got,) = found.placements
    assert (got.mapping, got.version, got.step, got.event) == (told.mapping, 3, 5, PlacementEvent.ANNOUNCED)
    assert got.terms == PlacementTerms(
        policy_version="p2",
        proposed_by="balancer",
        window=(0, 4),
        max_slowdown=0.05,
        rollback_version=1,
        count_ids=CountIds.PHYSICAL,
        expert_bytes=7,
        weight_digests={"w": "abababab"},
    )
    assert (len(found.rank_steps), found.rejected) == (1, ())


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"PLACEMENT_DIGEST": None}, RejectReason.MISSING_ATTRIBUTE, "moetrace.placement.digest is missing"),
        ({"PLACEMENT_DIGEST": "0" * 64}, RejectReason.MALFORMED_COLUMNS, "the mapping has"),
        ({"SCHEMA_VERSION": 99}, RejectReason.UNSUPPORTED_SCHEMA_VERSION, "upgrade the collector"),
        ({"PLACEMENT_VERSION": -1}, RejectReason.INVALID_ATTRIBUTE, "-1: 0 to"),
        ({"PLACEMENT_VERSION": "1"}, RejectReason.INVALID_ATTRIBUTE, "int expected, got string_value"),
        ({"PLACEMENT_EXPERTS": 9}, RejectReason.MALFORMED_COLUMNS, "no slot for expert 8"),
        ({"PLACEMENT_RANKS": 3}, RejectReason.MALFORMED_COLUMNS, "8 slots on 3 ranks"),
        ({"COLUMNS_PLACEMENT": b"x"}, RejectReason.MALFORMED_COLUMNS, "header bytes"),
        ({"PLACEMENT_KIND": "applied"}, RejectReason.INVALID_ATTRIBUTE, "announced or proposed"),
        ({"PLACEMENT_KIND": "judged"}, RejectReason.INVALID_ATTRIBUTE, "comparison: 0 characters"),
        (judged("[1]"), RejectReason.INVALID_ATTRIBUTE, "a comparison of run run as a JSON object"),
        (judged('{"run_id":"other"}'), RejectReason.INVALID_ATTRIBUTE, "a comparison of run run"),
        (judged('{"run_id":"run","x":NaN}'), RejectReason.INVALID_ATTRIBUTE, "as a JSON object"),
        (judged('{"run_id":"run","verdict":["x"]}'), RejectReason.INVALID_ATTRIBUTE, "verdict accepted or"),
        (
            judged('{"run_id":"run","verdict":"accepted","rollback_version":-1}'),
            RejectReason.INVALID_ATTRIBUTE,
            "rollback_version null or 0 to",
        ),
        (
            judged('{"run_id":"run","verdict":"accepted","x":1e999}'),
            RejectReason.INVALID_ATTRIBUTE,
            "moetrace.placement.comparison",
        ),
        ({"PLACEMENT_COUNTS": "x"}, RejectReason.INVALID_ATTRIBUTE, "logical or physical"),
        ({"PLACEMENT_WEIGHTS": "[1]"}, RejectReason.INVALID_ATTRIBUTE, "a JSON object"),
        ({"PLACEMENT_WEIGHTS": "[" * 50_000}, RejectReason.INVALID_ATTRIBUTE, "a JSON object"),
        ({"STEP_INDEX": 6}, RejectReason.IDENTITY_MISMATCH, "not the one of run run, step 6"),
        ({"RUN_ID": "a b"}, RejectReason.INVALID_ATTRIBUTE, "A-Za-z0-9"),
    ],
)
def test_a_wrong_one_is_rejected_by_name(changes: dict[str, Any], reason: RejectReason, detail: str) -> None:
    """One line says what was wrong; the step beside it is taken."""
    step = span(SyntheticRun(run_id="run").step(0)[0])
    found = decoded(placement_span(report(3, SWAPPED), **changes), step)
    assert found.placements == ()
    assert len(found.rank_steps) == 1
    assert [rejection.reason for rejection in found.rejected] == [reason]
    assert detail in found.rejected[0].detail


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 64))
def test_no_bytes_raise(block: bytes, cut: int) -> None:
    """Whatever the block holds, the sender gets an answer."""
    sound = placement_span(report(3, SWAPPED))
    whole = next(entry for entry in sound.attributes if entry.key == "moetrace.columns.placement")
    for payload in (block, whole.value.bytes_value[:cut], whole.value.bytes_value[:18] + block):
        found = decoded(placement_span(report(3, SWAPPED), COLUMNS_PLACEMENT=payload))
        assert len(found.rejected) + len(found.placements) == 1
