"""Joined steps -> Chrome trace events: tracks of ranks and streams, waits, arrows, load. Pure.

One process per rank::

    rank 0   step      |------------- step 7 -------------|
             stream 0  |work|~~ wait for rank 1 ~~|transfer|work|
    rank 1   step      |------------- step 7 -------------|
             stream 0  |========= work ========|transfer|work|
                                                ^ an arrow leads from here to the transfer of rank 0

Each rank's clock is moved to that of its group's lowest rank, by one amount per rank and step, so that
no duration changes. Ranks that could not be aligned say so in their name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from moetrace_collectors.model import RankStep
from moetrace_collectors.traces.exchanges import Exchange, Participant, exchanges_of
from moetrace_collectors.traces.rows import PhaseRow, rows_of
from moetrace_collectors.traces.step_clocks import RankClock
from moetrace_collectors.traces.step_records import TracedStep
from moetrace_collectors.traces.trace_events import (
    Event,
    Slice,
    arrow,
    counter,
    process_names,
    slice_event,
    track_names,
)

STEP_TRACK = 1_000_000
"""Track number of a rank's steps, past any stream."""
LOAD_PROCESS = 1_000_000_000
"""Process number of the counters that belong to no rank, past any rank."""
LEAST_WAIT_NS = 1_000
"""Shorter waits get no arrow."""


def step_events(steps: Sequence[TracedStep], clocks: Mapping[int, RankClock]) -> Iterator[Event]:
    """All events of these steps, in no order.

    Args:
        steps: What to draw; steps without unix times (all begin at 0) are laid one after the other.
        clocks: By rank; see `group_clocks`.
    """
    everyone = [one for step in steps for one in step.joined.rank_steps]
    origin = min((_start(one, clocks) for one in everyone), default=0)
    has_clocks = any(one.start_unix_ns for one in everyone)
    yield from _names(everyone, clocks)
    laid_ns, flow = 0, 0
    for step in steps:
        shift = laid_ns - origin
        starts = {(one.rank, one.microbatch): _start(one, clocks) + shift for one in step.joined.rank_steps}
        for one in step.joined.rank_steps:
            start = starts[one.rank, one.microbatch]
            yield slice_event(
                Slice(
                    process=one.rank,
                    track=STEP_TRACK + one.microbatch,
                    start_ns=start,
                    duration_ns=one.duration_ns,
                ),
                f"step {one.step}",
                "step",
                _verdict(step),
            )
            yield from _work(one, start)
        for exchange in exchanges_of(step):
            slices = {}
            for participant in exchange.participants.values():
                one = participant.rank_step
                start = starts[one.rank, one.microbatch]
                waited, transferred = _parts(participant, start)
                yield from _exchange_slices(exchange, participant, waited, transferred)
                slices[participant.rank_step.rank] = transferred if transferred.duration_ns else waited
            yield from _arrows(exchange, slices, flow)
            flow += len(slices)
        yield from _counters(step, min(starts.values()))
        if not has_clocks:
            laid_ns += max(one.duration_ns for one in step.joined.rank_steps)


def _start(one: RankStep, clocks: Mapping[int, RankClock]) -> int:
    clock = clocks.get(one.rank)
    if clock is None:
        return one.start_unix_ns
    return int(clock.fit.to_reference(np.array([one.start_unix_ns], dtype=np.int64))[0])


def _names(everyone: Sequence[RankStep], clocks: Mapping[int, RankClock]) -> Iterator[Event]:
    lowest = min((one.rank for one in everyone), default=0)
    streams: dict[int, set[int]] = {}
    microbatches: dict[int, set[int]] = {}
    hosts: dict[int, str] = {}
    errors_ns: dict[int, int] = {}
    for one in everyone:
        streams.setdefault(one.rank, set()).update(np.unique(one.phases.stream).tolist())
        microbatches.setdefault(one.rank, set()).add(one.microbatch)
        hosts[one.rank] = one.host_name
        errors_ns[one.rank] = max(one.anchor_error_ns, errors_ns.get(one.rank, -1))
    for rank in sorted(streams):
        clock = clocks.get(rank)
        name = f"rank {rank}" + (f" on {hosts[rank]}" if hosts[rank] else "")
        if clock is None or (clock.reference_rank == rank and rank != lowest):
            name += " (own clock)"
        elif clock.reference_rank not in (rank, lowest):
            name += f" (clock of rank {clock.reference_rank})"
        if errors_ns[rank] >= 0 and (clock is None or clock.reference_rank == rank):
            # Others are laid over this one by their exchanges, however they were placed.
            name += f" (device time, placed within {errors_ns[rank] / 1e3:.1f} us)"
        yield from process_names(rank, name, sort_index=rank)
        for microbatch in sorted(microbatches[rank]):
            label = f"steps, microbatch {microbatch}" if microbatch else "steps"
            yield from track_names(rank, STEP_TRACK + microbatch, label, sort_index=-1)
        for stream in sorted(streams[rank]):
            label = "compute stream" if stream == 0 else f"stream {stream}"
            yield from track_names(rank, stream, label, sort_index=stream)
    yield from process_names(LOAD_PROCESS, "expert load, max / mean", sort_index=LOAD_PROCESS)


def _verdict(step: TracedStep) -> dict[str, object]:
    row = step.row
    said: dict[str, object] = {
        "forward_mode": str(row.forward_mode),
        "evidence": str(row.evidence),
        "reason": row.reason,
    }
    if row.suspect is not None:
        said |= {
            "rank": row.suspect.rank,
            "phase": str(row.suspect.phase),
            "layer": "all" if row.suspect.layer is None else row.suspect.layer,
            "cause": str(row.cause),
            "worth_ms": round(row.suspect.worth_ns / 1e6, 6),
        }
    return said


def _work(one: RankStep, start_ns: int) -> Iterator[Event]:
    for row in rows_of(one):
        if row.is_barrier:
            continue
        where = Slice(
            process=one.rank,
            track=row.stream,
            start_ns=start_ns + row.start_offset_ns,
            duration_ns=row.duration_ns,
        )
        yield slice_event(where, str(row.phase), str(row.phase), _row_arguments(one, row))


def _parts(participant: Participant, start_ns: int) -> tuple[Slice, Slice]:
    one, row = participant.rank_step, participant.row
    begin = start_ns + row.start_offset_ns
    return (
        Slice(process=one.rank, track=row.stream, start_ns=begin, duration_ns=participant.wait_ns),
        Slice(
            process=one.rank,
            track=row.stream,
            start_ns=begin + participant.wait_ns,
            duration_ns=participant.transfer_ns,
        ),
    )


def _exchange_slices(
    exchange: Exchange, participant: Participant, waited: Slice, transferred: Slice
) -> Iterator[Event]:
    phase = str(exchange.key[2])
    arguments = {
        **_row_arguments(participant.rank_step, participant.row),
        "releaser": exchange.releaser_rank,
    }
    if waited.duration_ns:
        whom = f"rank {exchange.releaser_rank}" if exchange.releaser_rank >= 0 else "the others"
        yield slice_event(waited, f"{phase}: wait for {whom}", "wait", arguments)
    if transferred.duration_ns:
        yield slice_event(transferred, f"{phase}: transfer", "transfer", arguments)


def _arrows(exchange: Exchange, slices: Mapping[int, Slice], flow: int) -> Iterator[Event]:
    releaser = exchange.releaser
    if releaser is None:
        return
    source = slices[releaser.rank_step.rank]
    for number, (rank, participant) in enumerate(exchange.participants.items()):
        if rank != releaser.rank_step.rank and participant.wait_ns >= LEAST_WAIT_NS:
            yield from arrow(flow + number, "released", source, slices[rank])


def _counters(step: TracedStep, time_ns: int) -> Iterator[Event]:
    for rank, rows in sorted(step.received_rows.items()):
        yield counter(rank, "rows received", time_ns, rows)
    for (mode, layer), ratio in sorted(step.max_mean_ratio.items()):
        yield counter(LOAD_PROCESS, f"layer {layer}, {mode}", time_ns, round(ratio, 6))


def _row_arguments(one: RankStep, row: PhaseRow) -> dict[str, object]:
    said: dict[str, object] = {"step": one.step, "layer": row.layer, "direction": str(row.direction)}
    microbatch = row.microbatch or one.microbatch
    if microbatch:
        said["microbatch"] = microbatch
    if row.bytes >= 0:
        said["bytes"] = row.bytes
    if row.rows >= 0:
        said["rows"] = row.rows
    return said
