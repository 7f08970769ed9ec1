"""Synthetic multi-rank steps for tests, and the OTLP requests that ranks would send for them.

A step is simulated, not drawn at random: every rank has local work, an exchange ends on all ranks of
the group together, and whoever comes early waits inside it::

    rank 0  |== work ==|~~~~ wait ~~~~|transfer|
    rank 1  |===== slow work ========|transfer|

so a slow (rank, layer, phase) that a test asks for shows up in the others' waits exactly as on a
real machine. All numbers are functions of the run's fields: no clock, no random source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from moetrace_collectors.model import (
    CoactivationColumns,
    ExpertCounts,
    IntArray,
    PhaseColumns,
    RankStep,
    TrafficRow,
    ViolationCount,
    WaitCycles,
)
from moetrace_schemas import SCHEMA_VERSION, attributes, identity, spans
from moetrace_schemas.columns import COACTIVATION, EXPERTS, PHASES, TRAFFIC, VIOLATIONS, WAITS, RowFlag, pack
from moetrace_schemas.enums import COUNT_KIND_CODE, PHASE_CODE, CountKind, ForwardMode, Phase

LOCAL_WORK_NS: dict[Phase, int] = {
    Phase.OUTSIDE: 400_000,
    Phase.ROUTER: 50_000,
    Phase.PERMUTE: 60_000,
    Phase.EXPERT_GEMM: 300_000,
    Phase.UNPERMUTE: 40_000,
}
"""Local work per phase and layer of a calm rank, ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticRun:
    """A run whose steps can be asked for in any order."""

    run_id: str = "synthetic"
    world_size: int = 4
    num_layers: int = 2
    num_experts: int = 8
    num_pairs: int = 1024
    """Routed (token, slot) pairs per rank and layer."""
    transfer_ns: int = 100_000
    slow_rank: int | None = None
    slow_layer: int = 0
    slow_phase: Phase = Phase.EXPERT_GEMM
    slow_ns: int = 2_000_000
    """Extra local work of `slow_rank` in (`slow_layer`, `slow_phase`), ns."""
    lost_rows: int = 0
    """Rows of layer 0 that rank 0 sent and its first own expert never got: a `conservation` violation."""
    forward_mode: ForwardMode = ForwardMode.TRAIN
    warmup: bool = False
    jitter_ns: int = 3_000
    start_unix_ns: int = 1_900_000_000_000_000_000
    """Start of step 0. Lies in 2030 so that no table's time to live removes a test's rows."""

    def step(self, step: int) -> tuple[RankStep, ...]:
        """All ranks of one step, rank 0 first; every rank holds the same experts in every step.

        What experts receive is what all ranks routed to them: a run contradicts itself only where asked to.
        """
        routed = [self._routed(step, layer) for layer in range(self.num_layers)]
        holders = self._holders()
        sent = [self._sent(counts, holders) for counts in routed]
        rows: list[list[tuple[int, ...]]] = [[] for _ in range(self.world_size)]
        clock = [0] * self.world_size
        for layer in range(self.num_layers):
            for phases, exchange in (
                ((Phase.OUTSIDE, Phase.ROUTER, Phase.PERMUTE), Phase.DISPATCH),
                ((Phase.EXPERT_GEMM,), Phase.COMBINE),
            ):
                for rank in range(self.world_size):
                    for phase in phases:
                        received = int(sent[layer][:, rank].sum()) if phase is Phase.EXPERT_GEMM else -1
                        self._work(rows, clock, step, rank, layer, phase, received)
                release = max(clock) + self.transfer_ns
                for rank in range(self.world_size):
                    duration = release - clock[rank]
                    moved = int(sent[layer].sum(axis=1 if exchange is Phase.DISPATCH else 0)[rank])
                    rows[rank].append(
                        _row(layer, exchange, clock[rank], duration, moved * 16, moved, RowFlag.BARRIER)
                    )
                    clock[rank] = release
            for rank in range(self.world_size):
                self._work(rows, clock, step, rank, layer, Phase.UNPERMUTE, -1)
        return tuple(
            RankStep(
                run_id=self.run_id,
                step=step,
                rank=rank,
                microbatch=0,
                world_size=self.world_size,
                ep_rank=rank,
                ep_size=self.world_size,
                ep_group=0,
                forward_mode=self.forward_mode,
                sample_period=1,
                warmup=self.warmup,
                clock="host",
                duration_ns=clock[rank],
                start_unix_ns=self.start_unix_ns + step * 10_000_000,
                host_name=f"host-{rank // 8}",
                model_name="synthetic-moe",
                phases=_columns(rows[rank]),
                experts=self._experts(rank, routed, holders),
                traffic=tuple(
                    TrafficRow(
                        layer=layer, phase=PHASE_CODE[Phase.DISPATCH], row_bytes=16, rows=sent[layer][rank]
                    )
                    for layer in range(self.num_layers)
                ),
            )
            for rank in range(self.world_size)
        )

    def _work(
        self,
        rows: list[list[tuple[int, ...]]],
        clock: list[int],
        step: int,
        rank: int,
        layer: int,
        phase: Phase,
        received: int,
    ) -> None:
        duration = LOCAL_WORK_NS[phase] + self._jitter(step, rank, layer, phase)
        if (rank, layer, phase) == (self.slow_rank, self.slow_layer, self.slow_phase):
            duration += self.slow_ns
        rows[rank].append(_row(layer, phase, clock[rank], duration, -1, received, RowFlag(0)))
        clock[rank] += duration

    def _jitter(self, step: int, rank: int, layer: int, phase: Phase) -> int:
        # A fixed scramble of the place: calm steps are not all equal, and a run repeats exactly.
        if self.jitter_ns == 0:
            return 0
        mixed = (step * 7919 + rank * 104729 + layer * 1299709 + PHASE_CODE[phase] * 15485863) % 2147483647
        return (mixed * 48271) % 2147483647 % self.jitter_ns

    def _routed(self, step: int, layer: int) -> IntArray:
        """[experts]: pairs that each rank routes to each expert, the same on all ranks."""
        share, rest = divmod(self.num_pairs, self.num_experts)
        routed = np.full(self.num_experts, share, dtype=np.int64)
        routed[(step + layer) % self.num_experts] += rest
        return routed

    def _holders(self) -> IntArray:
        """[ranks, experts]: the rank that gets what a rank routes to an expert.

        Experts lie on the ranks in blocks. Where there are more ranks than experts, each expert has a copy
        in every block of as many ranks as there are experts, and a rank sends within its own block.
        """
        experts = np.arange(self.num_experts)
        if self.world_size <= self.num_experts:
            return np.tile(experts * self.world_size // self.num_experts, (self.world_size, 1))
        block = np.arange(self.world_size)[:, None] // self.num_experts * self.num_experts
        copies = block + experts
        return np.where(copies < self.world_size, copies, experts)

    def _sent(self, routed: IntArray, holders: IntArray) -> IntArray:
        """[ranks, ranks]: rows that each rank sends to each rank."""
        sent = np.zeros((self.world_size, self.world_size), dtype=np.int64)
        np.add.at(sent, (np.arange(self.world_size)[:, None], holders), routed)
        return sent

    def _experts(self, rank: int, routed: Sequence[IntArray], holders: IntArray) -> tuple[ExpertCounts, ...]:
        counts = []
        for layer, chosen in enumerate(routed):
            received = chosen * (holders == rank).sum(axis=0)
            if layer == 0 and rank == 0:
                received[0] -= min(self.lost_rows, int(received[0]))
            counts += [
                ExpertCounts(layer=layer, kind=COUNT_KIND_CODE[CountKind.ROUTED], counts=chosen),
                ExpertCounts(layer=layer, kind=COUNT_KIND_CODE[CountKind.RECEIVED], counts=received),
            ]
        return tuple(counts)


def _row(
    layer: int, phase: Phase, start: int, duration: int, payload: int, num_rows: int, flags: RowFlag
) -> tuple[int, ...]:
    # Order of moetrace_schemas.columns.PHASES; every (layer, phase) occurs once, so the ordinal is 0.
    return (layer, PHASE_CODE[phase], 0, 0, 0, 0, int(flags), start, duration, payload, num_rows)


def _columns(rows: Sequence[tuple[int, ...]]) -> PhaseColumns:
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(PHASES.columns))
    return PhaseColumns(
        **{spec.name: np.ascontiguousarray(table[:, index]) for index, spec in enumerate(PHASES.columns)}
    )


def phases_block(phases: PhaseColumns) -> bytes:
    """Packed phase rows of a rank step."""
    return pack(PHASES, [_ints(getattr(phases, spec.name)) for spec in PHASES.columns])


def experts_block(experts: Iterable[ExpertCounts]) -> bytes:
    """Packed per-expert counts."""
    entries = list(experts)
    values = [value for entry in entries for value in _ints(entry.counts)]
    columns = [
        [entry.layer for entry in entries],
        [entry.kind for entry in entries],
        [len(entry.counts) for entry in entries],
    ]
    return pack(EXPERTS, columns, values)


def traffic_block(traffic: Iterable[TrafficRow]) -> bytes:
    """Packed rows per destination rank."""
    entries = list(traffic)
    values = [value for entry in entries for value in _ints(entry.rows)]
    columns = [
        [entry.layer for entry in entries],
        [entry.phase for entry in entries],
        [entry.row_bytes for entry in entries],
        [len(entry.rows) for entry in entries],
    ]
    return pack(TRAFFIC, columns, values)


def waits_block(waits: Iterable[WaitCycles]) -> bytes:
    """Packed waits of exchange kernels."""
    entries = list(waits)
    columns = [[entry.phase for entry in entries], [len(entry.cycles) for entry in entries]]
    return pack(WAITS, columns, [value for entry in entries for value in _ints(entry.cycles)])


def _ints(column: IntArray) -> list[int]:
    return [int(value) for value in column]


def violations_block(violations: Sequence[ViolationCount]) -> bytes:
    """Packed violations."""
    return pack(
        VIOLATIONS,
        [
            [entry.layer for entry in violations],
            [entry.violation for entry in violations],
            [entry.count for entry in violations],
        ],
    )


def coactivation_block(pairs: CoactivationColumns) -> bytes:
    """Packed pairs of experts."""
    return pack(COACTIVATION, [getattr(pairs, column.name).tolist() for column in COACTIVATION.columns])


def span(rank_step: RankStep) -> Span:
    """The OTLP span a rank sends for its step."""
    trace = identity.trace_id(rank_step.run_id, rank_step.step)
    values: dict[str, str | bool | int | bytes] = {
        attributes.SCHEMA_VERSION: SCHEMA_VERSION,
        attributes.RUN_ID: rank_step.run_id,
        attributes.STEP_INDEX: rank_step.step,
        attributes.RANK: rank_step.rank,
        attributes.WORLD_SIZE: rank_step.world_size,
        attributes.EP_RANK: rank_step.ep_rank,
        attributes.EP_SIZE: rank_step.ep_size,
        attributes.EP_GROUP: rank_step.ep_group,
        attributes.MICROBATCH_INDEX: rank_step.microbatch,
        attributes.FORWARD_MODE: rank_step.forward_mode.value,
        attributes.SAMPLE_PERIOD: rank_step.sample_period,
        attributes.STEP_WARMUP: rank_step.warmup,
        attributes.CLOCK: rank_step.clock,
        attributes.DURATION_NS: rank_step.duration_ns,
        **({attributes.ANCHOR_ERROR_NS: rank_step.anchor_error_ns} if rank_step.anchor_error_ns >= 0 else {}),
        **({attributes.TRACER_NS: rank_step.tracer_ns} if rank_step.tracer_ns >= 0 else {}),
        attributes.COLUMNS_PHASES: phases_block(rank_step.phases),
    }
    optional: dict[str, str | bool | int | bytes] = {
        attributes.MODEL_NAME: rank_step.model_name,
        attributes.MODEL_VERSION: rank_step.model_version,
        attributes.COHORT: rank_step.cohort,
        attributes.PLACEMENT_VERSION: rank_step.placement_version,
        attributes.COLUMNS_EXPERTS: experts_block(rank_step.experts) if rank_step.experts else b"",
        attributes.COLUMNS_TRAFFIC: traffic_block(rank_step.traffic) if rank_step.traffic else b"",
        attributes.COLUMNS_VIOLATIONS: violations_block(rank_step.violations)
        if rank_step.violations
        else b"",
        attributes.COLUMNS_COACTIVATION: (
            b"" if rank_step.coactivation is None else coactivation_block(rank_step.coactivation)
        ),
        attributes.COLUMNS_WAITS: waits_block(rank_step.waits) if rank_step.waits else b"",
        attributes.COVERAGE_EXPECTED_SITES: rank_step.expected_sites,
        attributes.COVERAGE_SEEN_SITES: rank_step.seen_sites,
    }
    values.update({name: value for name, value in optional.items() if value})
    return Span(
        trace_id=trace.to_bytes(16, "big"),
        span_id=identity.span_id(trace, rank_step.rank, rank_step.microbatch).to_bytes(8, "big"),
        name=spans.MOE_STEP,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=rank_step.start_unix_ns,
        end_time_unix_nano=rank_step.start_unix_ns + rank_step.duration_ns,
        attributes=[KeyValue(key=name, value=any_value(value)) for name, value in values.items()],
    )


def any_value(value: str | bool | int | float | bytes) -> AnyValue:
    """One OTLP attribute value."""
    # bool before int: True is an int to Python and must not be one on the wire.
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    return AnyValue(string_value=value)


def request(rank_steps: Iterable[RankStep]) -> ExportTraceServiceRequest:
    """The export request that carries these rank steps, one resource per host."""
    by_host: dict[str, list[Span]] = {}
    for rank_step in rank_steps:
        by_host.setdefault(rank_step.host_name, []).append(span(rank_step))
    message = ExportTraceServiceRequest()
    for host, host_spans in by_host.items():
        entry = ResourceSpans(scope_spans=[ScopeSpans(spans=host_spans)])
        entry.resource.attributes.append(KeyValue(key="host.name", value=any_value(host)))
        message.resource_spans.append(entry)
    return message
