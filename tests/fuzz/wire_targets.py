"""The wire: OTLP bodies in protobuf and JSON, spans with odd attributes, packed columns."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fuzz.mutation import INTERESTING_INTEGERS, ODD_VALUES
from moetrace_collectors.decode import decode
from moetrace_collectors.decode_columns import decode_experts, decode_phases, decode_traffic
from moetrace_collectors.intake import Intake
from moetrace_collectors.receivers.handler import OverloadedError
from moetrace_collectors.receivers.otlp_body import JSON, PROTOBUF, BodyError, decompress, parse
from moetrace_collectors.request_handler import RequestHandler
from moetrace_collectors.self_metrics import SelfMetrics
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas import attributes, identity
from moetrace_schemas.columns import ColumnsError
from unit.collectors.test_otlp_body import as_otlp_json

RUN = SyntheticRun(world_size=2, num_layers=2)
LIMIT = 200_000
MAX_WORLD_SIZE = 64
DATA = Path(__file__).parents[1] / "data"


class _Ledger:
    """The real handler and intake behind a target: every rank step that is turned away is counted."""

    def __init__(self) -> None:
        self._new()

    def _new(self) -> None:
        self.intake = Intake(max_requests=10_000, max_bytes=2**28, clock_ns=lambda: 0)
        self.handler = RequestHandler(
            intake=self.intake, metrics=SelfMetrics(SeriesBook()), max_world_size=MAX_WORLD_SIZE
        )

    def take(self, data: bytes, content_type: str, encoding: str) -> str:
        """As a receiver does it; checks that received = rejected + pending grew by what the outcome says."""
        before = self.intake.snapshot()
        outcome = "ok"
        try:
            plain = decompress(data, encoding=encoding, max_bytes=LIMIT)
            message = parse(plain, content_type=content_type, max_spans=500)
            accepted = self.handler.take(message)
            decoded = decode(message, max_world_size=MAX_WORLD_SIZE)
            expected = (len(decoded.rank_steps), len(decoded.rejected))
            if accepted.rejected_spans != len(decoded.rejected):
                raise AssertionError(f"answer says {accepted.rejected_spans} rejected, {expected} were")
            if decoded.rejected:
                outcome = f"rejected: {decoded.rejected[0].reason.value}"
            elif not decoded.rank_steps:
                outcome = "ok, nothing of ours"
        except BodyError as error:
            self.handler.refuse(error.reason, str(error), data)
            expected = (0, 1)
            outcome = f"refused: {error.reason.value}"
        except OverloadedError:
            self._new()
            return "full"
        after = self.intake.snapshot()
        pending = after.pending - before.pending
        rejected = sum(after.rejected.values()) - sum(before.rejected.values())
        if (pending, rejected) != expected or after.received - before.received != sum(expected):
            raise AssertionError(f"ledger grew by {(pending, rejected)}, expected {expected}")
        return outcome


class OtlpBodyTarget:
    """Protobuf bodies, plain or gzip."""

    name = "otlp body, protobuf"

    def __init__(self) -> None:
        self._ledger = _Ledger()
        plain = [request(RUN.step(step)).SerializeToString() for step in (0, 1)]
        plain.append(request(SyntheticRun(world_size=1, num_layers=1).step(3)).SerializeToString())
        foreign = ExportTraceServiceRequest()
        span = foreign.resource_spans.add().scope_spans.add().spans.add(name="other")
        for key in ("a", "b"):
            span.attributes.add(key=key).value.array_value.values.add().string_value = "x"
            span.events.add(name=key).attributes.add(key=key).value.kvlist_value.values.add(key=key)
            span.links.add(trace_id=b"1" * 16).attributes.add(key=key).value.double_value = 1.5
        plain.append(foreign.SerializeToString())
        self.seeds = [b"p" + body for body in plain] + [b"g" + gzip.compress(body, 1) for body in plain]
        self.documents: list[Any] = []

    def run(self, data: bytes) -> str:
        """The first byte chooses the encoding."""
        return self._ledger.take(data[1:], PROTOBUF, "gzip" if data[:1] == b"g" else "")


class JsonBodyTarget:
    """OTLP/JSON."""

    name = "otlp body, json"

    def __init__(self) -> None:
        self._ledger = _Ledger()
        self.documents = [as_otlp_json(), json.loads((DATA / "otlp" / "trace.json").read_text())]
        self.seeds = [json.dumps(document).encode() for document in self.documents]

    def run(self, data: bytes) -> str:
        """One body."""
        return self._ledger.take(data, JSON, "")


class SpanTarget:
    """Well-formed spans with odd types, values, numbers and sizes; the input seeds the choice."""

    name = "spans with odd attributes"

    def __init__(self) -> None:
        self._ledger = _Ledger()
        self._base = request(RUN.step(0))
        self.seeds = [number.to_bytes(8, "little") for number in range(8)]
        self.documents: list[Any] = []

    def run(self, data: bytes) -> str:
        """One request with one to six changes."""
        rng = random.Random(data)
        message = ExportTraceServiceRequest()
        message.CopyFrom(self._base)
        for _ in range(1 + rng.randrange(6)):
            spans = message.resource_spans[0].scope_spans[0].spans
            _change_span(spans[rng.randrange(len(spans))], rng)
        return self._ledger.take(message.SerializeToString(), PROTOBUF, "")


def _change_span(span: Any, rng: random.Random) -> None:
    kind = rng.randrange(8)
    if not span.attributes or kind == 0:
        span.attributes.add(key=rng.choice(list(attributes.TYPES))).value.int_value = 1
        return
    entry = span.attributes[rng.randrange(len(span.attributes))]
    if kind == 1:
        _set_value(entry.value, rng)
    elif kind == 2:
        entry.value.int_value = max(-(2**63), min(2**63 - 1, rng.choice(INTERESTING_INTEGERS)))
    elif kind == 3:
        span.attributes.remove(entry)
    elif kind == 4:
        for number in range(rng.choice((1, 100, 200))):
            span.attributes.add(key=f"extra.{number}").value.string_value = "x" * rng.choice((1, 600))
    elif kind == 5:
        span.trace_id = rng.randbytes(rng.choice((0, 8, 16, 17)))
    elif kind == 6:
        span.start_time_unix_nano = rng.choice(INTERESTING_INTEGERS) % 2**64
    else:
        step, run_id = rng.choice(INTERESTING_INTEGERS) % 2**63, rng.choice(("synthetic", "other", "a b", ""))
        for entry in span.attributes:
            if entry.key == attributes.RUN_ID:
                entry.value.string_value = run_id
            elif entry.key == attributes.STEP_INDEX:
                entry.value.int_value = step
        span.trace_id = identity.trace_id(run_id, step).to_bytes(16, "big")


def _set_value(value: Any, rng: random.Random) -> None:
    odd = rng.choice(ODD_VALUES)
    if isinstance(odd, str):
        value.string_value = odd
    elif isinstance(odd, bool):
        value.bool_value = odd
    elif isinstance(odd, float):
        value.double_value = odd
    elif isinstance(odd, int):
        value.int_value = max(-(2**63), min(2**63 - 1, odd))
    elif odd is None:
        value.Clear()
    else:
        value.bytes_value = rng.randbytes(rng.randrange(64))


class ColumnsTarget:
    """Packed columns alone, as bytes of a block."""

    def __init__(self, kind: str) -> None:
        self.name = f"packed columns, {kind}"
        key, self._decode = {
            "phases": (attributes.COLUMNS_PHASES, decode_phases),
            "experts": (attributes.COLUMNS_EXPERTS, decode_experts),
            "traffic": (attributes.COLUMNS_TRAFFIC, lambda block: decode_traffic(block, ep_size=2)),
        }[kind]
        spans = request(RUN.step(0)).resource_spans[0].scope_spans[0].spans
        self.seeds = [
            entry.value.bytes_value for span in spans for entry in span.attributes if entry.key == key
        ]
        assert self.seeds
        self.documents: list[Any] = []

    def run(self, data: bytes) -> str:
        """One block."""
        try:
            self._decode(data)
        except ColumnsError as error:
            if "\n" in str(error) or len(str(error)) > 400:
                raise AssertionError("an error of more than one short line") from error
            return "refused: malformed_columns"
        return "ok"


def spans_of(body: bytes) -> int | None:
    """Spans that the protobuf library sees in a body; None where it does not parse."""
    message = ExportTraceServiceRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        return None
    return sum(len(scope.spans) for part in message.resource_spans for scope in part.scope_spans)
