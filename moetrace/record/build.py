"""A finished buffer -> a StepRecord. Runs in the drain thread, once every mark can be resolved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from moetrace.record.assembler import STREAM_SHIFT, Assembler
from moetrace.record.buffer import WIDTH, StepBuffer
from moetrace.record.receipts import settle
from moetrace.record.replays import replayed_calls
from moetrace.record.types import PhaseRow, StepRecord, TrafficRecord
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Direction, Phase, SkipReason

_BARRIER = int(RowFlag.BARRIER)
_Note = TypeVar("_Note")


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
        phases=_with_rows(phases, buffer),
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


def _with_rows(phases: tuple[PhaseRow, ...], buffer: StepBuffer) -> tuple[PhaseRow, ...]:
    """Rows and bytes of the payload exchange and of the GEMM.

    The payload is the last of a layer's dispatches, but for those that its framework sends behind it.
    Traffic is that of the forward pass; activation recompute repeats its times, not its counts. A layer that
    ran several times in the step (several forwards) starts anew at its router, and was noted in the same
    order; where there are not as many notes as passes, rows stay unknown.
    """
    sent, received = _noted(buffer)
    if not sent and not received:
        return phases
    passes: dict[int, int] = {}
    places: list[tuple[int, int]] = []  # index and pass, of the forward's exchanges and GEMMs
    for index, row in enumerate(phases):
        if row.direction is not Direction.FORWARD:
            continue
        if row.phase is Phase.ROUTER and not row.flags & _BARRIER:
            passes[row.layer] = passes.get(row.layer, 0) + 1
        elif row.flags & _BARRIER or row.phase is Phase.EXPERT_GEMM:
            places.append((index, passes.get(row.layer, 0)))
    exchanges: dict[tuple[int, Phase], dict[int, list[int]]] = {}
    gemms: dict[int, dict[int, list[int]]] = {}
    for index, number in places:
        row = phases[index]
        # What comes before a layer's only router is of its only pass.
        number = number if passes.get(row.layer, 0) > 1 else 1
        if row.flags & _BARRIER:
            exchanges.setdefault((row.layer, row.phase), {}).setdefault(number, []).append(index)
        else:
            gemms.setdefault(row.layer, {}).setdefault(number, []).append(index)
    rows = list(phases)
    for key, by_pass in exchanges.items():
        noted, behind = _by_pass(sent.get(key, []), passes.get(key[0], 0)), buffer.behind_payload.get(key, 0)
        if noted.keys() != by_pass.keys() or any(len(indices) <= behind for indices in by_pass.values()):
            continue
        for number, indices in by_pass.items():
            # Of hand-written code without a router nothing else may tell its passes.
            if len(noted[number]) == 1:
                moved, size = noted[number][0]
                index = indices[-1 - behind]
                rows[index] = rows[index]._replace(rows=moved, bytes=size)
    for layer, of_pass in gemms.items():
        counted = _by_pass(received.get(layer, []), passes.get(layer, 0))
        if counted.keys() == of_pass.keys() and all(len(indices) == 1 for indices in of_pass.values()):
            for number, (index,) in of_pass.items():
                rows[index] = rows[index]._replace(rows=sum(counted[number]))
    return tuple(rows)


def _noted(
    buffer: StepBuffer,
) -> tuple[dict[tuple[int, Phase], list[tuple[int, int]]], dict[int, list[int]]]:
    """Rows and bytes sent by layer and phase, and rows received by layer, in the order of the passes."""
    sent: dict[tuple[int, Phase], list[tuple[int, int]]] = {}
    for layer, phase, row_bytes, rows in buffer.traffic:
        sent.setdefault((layer or 0, Phase(phase)), []).append((sum(rows), sum(rows) * row_bytes))
    received: dict[int, list[int]] = {}
    for layer, received_rows in buffer.local_rows:
        received.setdefault(layer or 0, []).append(received_rows)
    return sent, received


def _by_pass(noted: list[_Note], passes: int) -> dict[int, list[_Note]]:
    """What was noted in each pass through a layer, from 1; nothing where that cannot be told.

    Without a router, or with one call of it, all is of one pass.
    """
    if passes <= 1:
        return {1: noted} if noted else {}
    return {number: [one] for number, one in enumerate(noted, 1)} if len(noted) == passes else {}
