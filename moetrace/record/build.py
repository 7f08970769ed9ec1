"""A finished buffer -> a StepRecord. Runs in the drain thread, once every mark can be resolved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from moetrace.record.assembler import STREAM_SHIFT, Assembler
from moetrace.record.buffer import WIDTH, StepBuffer
from moetrace.record.receipts import settle
from moetrace.record.replays import replayed_calls
from moetrace.record.types import PhaseRow, StepRecord, TrafficRecord
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Direction, Phase, SkipReason

_BARRIER = int(RowFlag.BARRIER)


def build_record(
    buffer: StepBuffer,
    assembler: Assembler,
    clock: str,
    skipped: Counter[SkipReason],
    *,
    interval_cost_ns: float = 0.0,
) -> StepRecord:
    """A finished buffer as a record; intervals without a stamp (mark -1) are left out.

    Calls that have no time of their own are added to `skipped` by reason. `interval_cost_ns` is the
    calibrated cost of one interval, 0.0 where there is none.
    """
    to_ns, stream = buffer.track.nanoseconds, buffer.track.stream
    start, end = to_ns(buffer.start_mark), to_ns(buffer.end_mark)
    calls, unstamped = [], set()
    for site, first, last, flags in buffer.intervals():
        if first >= 0 and last >= 0:
            calls.append((site, to_ns(first), to_ns(last), flags | stream(last) << STREAM_SHIFT))
        else:
            unstamped.add(site)
    calls.extend(replayed_calls(buffer.replays, buffer.track, skipped))
    placed = buffer.track.placed()
    traffic = _summed(
        TrafficRecord(layer=layer or 0, phase=Phase(phase), row_bytes=row_bytes, rows=tuple(rows))
        for layer, phase, row_bytes, rows in buffer.traffic
    )
    phases = assembler.rows(calls, start, end, microbatch=buffer.microbatch)
    counter = buffer.counter
    settled = settle(
        counter.rows() if counter is not None else (),
        counter.sites if counter is not None else (),
        traffic=traffic,
        seen=counter.violations() if counter is not None else (),
        placement_version=buffer.placement_version,
        checking=counter is not None and counter.checking,
        unjudged=counter.unjudged if counter is not None else (),
        dummy=counter is not None and counter.dummy,
    )
    return StepRecord(
        step=buffer.step,
        microbatch=buffer.microbatch,
        forward_mode=buffer.forward_mode,
        cohort=buffer.cohort,
        warmup=buffer.warmup,
        placement_version=buffer.placement_version,
        clock=clock,
        start_unix_ns=buffer.start_unix_ns if placed is None else placed.unix_ns,
        anchor_error_ns=-1 if placed is None else placed.error_ns,
        duration_ns=end - start,
        phases=_with_rows(phases, traffic, buffer),
        experts=settled.experts,
        traffic=traffic,
        violations=settled.violations,
        coactivation=counter.coactivation_rows() if counter is not None else (),
        waits=counter.waits.rows() if counter is not None else (),
        expected_sites=buffer.expected_sites,
        # A layer that a graph holds as one call did call its parts.
        seen_sites=frozenset(call[0] for call in calls).union(
            *(replay.graph.inside for replay in buffer.replays if replay.graph is not None)
        ),
        unstamped_sites=frozenset(unstamped),
        tracer_ns=_tracer_ns(buffer, interval_cost_ns),
    )


def _tracer_ns(buffer: StepBuffer, interval_cost_ns: float) -> int:
    if not interval_cost_ns:
        return -1
    return round(buffer.length // WIDTH * interval_cost_ns) + buffer.counting_ns


def _local_rows(buffer: StepBuffer) -> dict[int, int]:
    totals: dict[int, int] = {}
    for layer, rows in buffer.local_rows:
        totals[layer or 0] = totals.get(layer or 0, 0) + rows
    return totals


def _exchanged_once(buffer: StepBuffer) -> frozenset[tuple[int, str]]:
    """(layer, phase) of exchanges that ran once; of hand-written code nothing else may tell its passes."""
    calls = Counter((layer or 0, phase) for layer, phase, *_ in buffer.traffic)
    return frozenset(key for key, count in calls.items() if count == 1)


def _summed(traffic: Iterable[TrafficRecord]) -> tuple[TrafficRecord, ...]:
    """One record per (layer, phase): several forwards of one step add up."""
    sums: dict[tuple[int, Phase, int], list[int]] = {}
    for item in traffic:
        key = (item.layer, item.phase, item.row_bytes)
        have = sums.setdefault(key, [0] * len(item.rows))
        sums[key] = [a + b for a, b in zip(have, item.rows, strict=True)]
    return tuple(
        TrafficRecord(layer=layer, phase=phase, row_bytes=row_bytes, rows=tuple(rows))
        for (layer, phase, row_bytes), rows in sums.items()
    )


def _with_rows(
    phases: tuple[PhaseRow, ...], traffic: tuple[TrafficRecord, ...], buffer: StepBuffer
) -> tuple[PhaseRow, ...]:
    """Rows and bytes of the payload exchange and of the GEMM.

    The payload is the last of a layer's dispatches, but for those that its framework sends behind it.
    Traffic is that of the forward pass; activation recompute repeats its times, not its counts. Where
    a layer ran several times in the step (several forwards), rows cannot be told apart by pass here
    and stay unknown.
    """
    once, local_rows = _exchanged_once(buffer), _local_rows(buffer)
    if not traffic and not local_rows:
        return phases
    sent = {(item.layer, item.phase): (sum(item.rows), sum(item.rows) * item.row_bytes) for item in traffic}
    exchanges: dict[tuple[int, Phase], list[int]] = {}
    gemms: dict[int, list[int]] = {}
    passes: dict[int, int] = {}
    for index, row in enumerate(phases):
        if row.direction is not Direction.FORWARD:
            continue
        if row.flags & _BARRIER:
            exchanges.setdefault((row.layer, row.phase), []).append(index)
        elif row.phase is Phase.ROUTER:
            passes[row.layer] = passes.get(row.layer, 0) + 1
        elif row.phase is Phase.EXPERT_GEMM:
            gemms.setdefault(row.layer, []).append(index)
    rows = list(phases)
    for key, indices in exchanges.items():
        behind = buffer.behind_payload.get(key, 0)
        if key in sent and key in once and passes.get(key[0], 1) == 1 and behind < len(indices):
            index = indices[-1 - behind]
            rows[index] = rows[index]._replace(rows=sent[key][0], bytes=sent[key][1])
    for layer, indices in gemms.items():
        if layer in local_rows and passes.get(layer, 1) == 1 and len(indices) == 1:
            rows[indices[0]] = rows[indices[0]]._replace(rows=local_rows[layer])
    return tuple(rows)
