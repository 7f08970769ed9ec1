"""Steps as ordinary spans: what a receiver gets, and that the collector's own decoder reads it back."""

from __future__ import annotations

import functools
import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from moetrace_collectors.decode import decode
from moetrace_collectors.errors import UsageError
from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.traces import otlp_export
from moetrace_collectors.traces.joined_steps import traced_step
from moetrace_collectors.traces.otlp_spans import step_spans
from moetrace_collectors.traces.step_clocks import group_clocks
from moetrace_collectors.traces.step_records import TracedStep
from moetrace_collectors.verdict import VerdictEngine
from moetrace_schemas import attributes, identity, spans
from moetrace_schemas.columns import PHASES
from moetrace_schemas.enums import ClosedBy, RejectReason

RUN = SyntheticRun(slow_rank=2, slow_layer=1, slow_ns=3_000_000)


class Receiver:
    """OTLP over HTTP on a free port; takes so many requests and refuses the rest."""

    def __init__(self, takes: int) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                taken = len(receiver.requests) < takes
                if taken:
                    receiver.requests.append(ExportTraceServiceRequest.FromString(gzip.decompress(body)))
                    receiver.paths.append(self.path)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if taken else 400)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[Span]:
        """Everything taken, in order of arrival."""
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def receiver(takes: int = 1000) -> Iterator[Receiver]:
    """A running one."""
    running = Receiver(takes)
    thread = threading.Thread(target=running.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.server.shutdown()
        running.server.server_close()


def traced(rank_steps: tuple[RankStep, ...]) -> TracedStep:
    """A judged step."""
    joined = JoinedStep(
        run_id=rank_steps[0].run_id,
        step=rank_steps[0].step,
        world_size=rank_steps[0].world_size,
        rank_steps=rank_steps,
        missing_ranks=(),
        closed_by=ClosedBy.COMPLETE,
    )
    return traced_step(joined, VerdictEngine().judge(joined))


def sent(steps: list[TracedStep], *, takes: int = 1000) -> tuple[Receiver, tuple[int, int]]:
    """What a receiver got of these steps, and what the exporter says of it."""
    clocks, _ = group_clocks([step.joined for step in steps])
    with receiver(takes) as running:
        exporter = otlp_export.make_exporter(running.url)
        outcome = otlp_export.send(exporter, (one for step in steps for one in step_spans(step, clocks)))
        exporter.shutdown()
    return running, outcome


def values(span: Span) -> dict[str, AnyValue]:
    """Attributes by name."""
    return {entry.key: entry.value for entry in span.attributes}


def test_the_collectors_own_decoder_reads_the_same_phase_rows() -> None:
    """Out as plain spans over HTTP and in again: every phase row and the step's identity are as before."""
    steps = [traced(RUN.step(step)) for step in (5, 6)]
    running, (taken, refused) = sent(steps)
    assert refused == 0
    assert set(running.paths) == {"/v1/traces"}
    assert taken == len(running.spans())
    decoded = [decode(request, max_world_size=64) for request in running.requests]
    assert [d.rejected for d in decoded] == [()] * len(decoded)
    assert [d.num_foreign_spans for d in decoded] == [0] * len(decoded)
    found = {(one.step, one.rank): one for d in decoded for one in d.rank_steps}
    given = {(one.step, one.rank): one for step in steps for one in step.joined.rank_steps}
    assert set(found) == set(given)
    for key, one in given.items():
        other = found[key]
        for column in PHASES.columns:
            assert np.array_equal(getattr(one.phases, column.name), getattr(other.phases, column.name)), (
                key,
                column.name,
            )
        for name in (
            "run_id",
            "world_size",
            "ep_rank",
            "ep_group",
            "forward_mode",
            "duration_ns",
            "host_name",
        ):
            assert getattr(one, name) == getattr(other, name), name


def test_a_step_is_one_trace_with_derived_ids() -> None:
    """Ids are those that ranks derive, unique, and the same in a second export."""
    step = traced(RUN.step(5))
    first, second = (sent([step])[0].spans() for _ in range(2))
    trace = identity.trace_id(RUN.run_id, 5).to_bytes(16, "big")
    assert {span.trace_id for span in first} == {trace}
    assert len({span.span_id for span in first}) == len(first)
    assert [span.span_id for span in first] == [span.span_id for span in second]
    parents = {span.span_id: span for span in first if span.name == spans.MOE_STEP}
    expected = {
        identity.span_id(int.from_bytes(trace, "big"), rank, 0).to_bytes(8, "big") for rank in range(4)
    }
    assert set(parents) == expected
    children = [span for span in first if span.name == spans.MOE_PHASE]
    assert len(children) == sum(len(one.phases) for one in step.joined.rank_steps)
    assert {span.parent_span_id for span in children} == expected


def test_who_waited_links_to_whom_it_waited_for() -> None:
    """The combine of layer 1 of ranks 0, 1 and 3 links to that of rank 2, and says how long they waited."""
    running, _ = sent([traced(RUN.step(5))])
    combines = {
        values(span)[attributes.RANK].int_value: span
        for span in running.spans()
        if span.name == spans.MOE_PHASE
        and values(span)[attributes.PHASE].string_value == "combine"
        and values(span)[attributes.LAYER_INDEX].int_value == 1
        and values(span)[attributes.FLAGS].int_value == 1
    }
    assert set(combines) == {0, 1, 2, 3}
    for rank, span in combines.items():
        said = values(span)
        assert said[attributes.RELEASER_RANK].int_value == 2
        links = [link.span_id for link in span.links]
        assert links == ([] if rank == 2 else [combines[2].span_id])
        waited = said[attributes.WAIT_NS].int_value
        assert (waited > 2_000_000) == (rank != 2)


def test_the_step_says_its_verdict_and_every_attribute_is_in_the_catalogue() -> None:
    """Evidence, rank, phase and cause ride on the step's spans; no name is made up."""
    catalogue = {
        value for name, value in vars(attributes).items() if name.isupper() and isinstance(value, str)
    }
    step = traced(RUN.step(5))
    running, _ = sent([step])
    for span in running.spans():
        assert set(values(span)) <= catalogue
        if span.name == spans.MOE_STEP:
            assert values(span)[attributes.VERDICT_EVIDENCE].string_value == str(step.row.evidence)
            assert values(span)[attributes.VERDICT_REASON].string_value == step.row.reason


def test_clocks_move_whole_rank_steps() -> None:
    """A clock that is 3 s ahead is laid over the others; offsets and durations inside do not change."""
    straight = [traced(RUN.step(step)) for step in range(5, 8)]
    ahead = [
        traced(
            tuple(
                replace(one, start_unix_ns=one.start_unix_ns + 3_000_000_000 * (one.rank == 1))
                for one in RUN.step(step)
            )
        )
        for step in range(5, 8)
    ]
    right, moved = (sent(steps)[0].spans() for steps in (straight, ahead))
    for one, other in zip(right, moved, strict=True):
        assert abs(one.start_time_unix_nano - other.start_time_unix_nano) < 1000
        assert (
            one.end_time_unix_nano - one.start_time_unix_nano
            == other.end_time_unix_nano - other.start_time_unix_nano
        )


def test_a_refusal_ends_the_export_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken before is counted, and nothing is sent after the first request that is not taken."""
    monkeypatch.setattr(otlp_export, "SPANS_PER_REQUEST", 1)
    steps = [traced(RUN.step(5))]
    one = 1 + len(steps[0].joined.rank_steps[0].phases)
    running, outcome = sent(steps, takes=2)
    assert outcome == (2 * one, one)
    assert len(running.requests) == 2


def test_addresses_are_base_or_full() -> None:
    """The path of traces is added where it is missing; no http address is a UsageError."""
    assert otlp_export.endpoint_of("http://h:4318/") == "http://h:4318/v1/traces"
    assert otlp_export.endpoint_of("https://h/v1/traces") == "https://h/v1/traces"
    with pytest.raises(UsageError, match="--otlp h:4318: an address as in"):
        otlp_export.endpoint_of("h:4318")


@functools.cache
def plain_bytes() -> bytes:
    """One rank's step as plain spans, as sent."""
    running, _ = sent([traced(RUN.step(5))])
    first = running.requests[0].resource_spans[0].scope_spans[0].spans
    parent = next(span for span in first if span.name == spans.MOE_STEP)
    own = [span for span in first if parent.span_id in (span.span_id, span.parent_span_id)]
    scope = ScopeSpans(spans=own)
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[scope])]).SerializeToString()


def plain_request() -> ExportTraceServiceRequest:
    """The same, to be changed."""
    return ExportTraceServiceRequest.FromString(plain_bytes())


def test_children_without_their_step_are_foreign() -> None:
    """Their step may come with another request, or never: they are counted and left alone."""
    request = plain_request()
    del request.resource_spans[0].scope_spans[0].spans[0]
    decoded = decode(request, max_world_size=64)
    assert (decoded.rank_steps, decoded.rejected) == ((), ())
    assert decoded.num_foreign_spans == len(request.resource_spans[0].scope_spans[0].spans)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (attributes.PHASE, None, "moe.phase span: moetrace.phase is missing"),
        (attributes.LAYER_INDEX, None, "moe.phase span: moetrace.layer.index is missing"),
        (
            attributes.PHASE,
            AnyValue(string_value="thinking"),
            "moetrace.phase is 'thinking': outside, router",
        ),
        (attributes.ROWS, AnyValue(string_value="many"), "moetrace.rows: int expected"),
        (attributes.LAYER_INDEX, AnyValue(int_value=70_000), "a value is out of range"),
        (attributes.ORDINAL, AnyValue(int_value=-1), "a value is out of range"),
    ],
)
def test_a_bad_child_rejects_its_step(name: str, value: AnyValue | None, message: str) -> None:
    """Half a step is none: the rejection names what is wrong with the child."""
    request = plain_request()
    child = request.resource_spans[0].scope_spans[0].spans[1]
    kept = [entry for entry in child.attributes if entry.key != name]
    del child.attributes[:]
    child.attributes.extend(kept)
    if value is not None:
        child.attributes.add(key=name, value=value)
    decoded = decode(request, max_world_size=64)
    assert decoded.rank_steps == ()
    assert [rejection.reason for rejection in decoded.rejected] == [RejectReason.MALFORMED_COLUMNS]
    assert message in decoded.rejected[0].detail


def test_what_a_child_leaves_out_has_a_meaning() -> None:
    """Only phase and layer are needed: the rest is forward, first, on the compute stream, size unknown."""
    request = plain_request()
    child = request.resource_spans[0].scope_spans[0].spans[1]
    kept = [entry for entry in child.attributes if entry.key in (attributes.PHASE, attributes.LAYER_INDEX)]
    del child.attributes[:]
    child.attributes.extend(kept)
    rows = decode(request, max_world_size=64).rank_steps[0].phases
    assert (int(rows.rows[0]), int(rows.bytes[0]), int(rows.stream[0]), int(rows.flags[0])) == (-1, -1, 0, 0)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(attributes.PHASE_TYPES)),
            st.one_of(
                st.integers(-(2**63), 2**63 - 1).map(lambda value: AnyValue(int_value=value)),
                st.text(max_size=12).map(lambda value: AnyValue(string_value=value)),
                st.sampled_from(["dispatch", "forward"]).map(lambda value: AnyValue(string_value=value)),
                st.just(AnyValue()),
            ),
        ),
        max_size=12,
    ),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_no_child_makes_the_decoder_raise(
    given_attributes: list[tuple[str, AnyValue]], start: int, end: int
) -> None:
    """Whatever a child says, its step is decoded or rejected, and nothing is counted twice."""
    request = plain_request()
    child = request.resource_spans[0].scope_spans[0].spans[1]
    del child.attributes[:]
    for name, value in given_attributes:
        child.attributes.add(key=name, value=value)
    child.start_time_unix_nano, child.end_time_unix_nano = start, end
    decoded = decode(request, max_world_size=64)
    assert len(decoded.rank_steps) + len(decoded.rejected) == 1
    assert decoded.num_foreign_spans == 0
