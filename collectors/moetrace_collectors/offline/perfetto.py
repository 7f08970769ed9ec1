"""The analysis as a Chrome trace that Perfetto and chrome://tracing open: ranks on one clock. Pure.

One process per rank. Its streams show the device rows under their MoE phase (or, for files that hold steps
and no kernels, the phases themselves); a track of its own shows each joined collective cut into wait and
transfer, with arrows from the rank that released it to those that waited. Ranks whose clock could not be
aligned are drawn by their own clock, and their process name says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import numpy as np

from moetrace_collectors.align import SAME_CLOCK, ClockFit
from moetrace_collectors.model import IntArray
from moetrace_collectors.offline.analysis import Analysis
from moetrace_collectors.offline.collectives import JoinedCollective, RankCollective
from moetrace_collectors.offline.phases import OTHER
from moetrace_collectors.offline.rank_steps import RankInput
from moetrace_collectors.traces.joined_steps import traced_step
from moetrace_collectors.traces.step_clocks import group_clocks
from moetrace_collectors.traces.step_trace import LEAST_WAIT_NS, step_events
from moetrace_collectors.traces.trace_events import (
    Event,
    Slice,
    arrow,
    process_names,
    slice_event,
    track_names,
    write_events,
)
from moetrace_schemas.enums import PHASE_BY_CODE

COLLECTIVE_TRACK = 1_000_000
"""Track number of a rank's collectives, past any stream."""


def write_perfetto(analysis: Analysis, out: IO[str]) -> int:
    """Write the trace; returns the number of events."""
    return write_events(_events(analysis), out)


def _events(analysis: Analysis) -> Iterator[Event]:
    if not analysis.inputs:
        yield from _step_events(analysis)
        return
    origin = min(
        (int(_aligned(given, clock).min()) for given, clock in _drawn(analysis) if len(given.trace.device)),
        default=0,
    )
    for given, clock in _drawn(analysis):
        yield from _rank_events(given, clock, origin, aligned=given.trace.rank in analysis.clocks)
    flow = 0
    for one in analysis.collectives:
        yield from _collective_events(one, analysis, origin, flow)
        flow += len(one.by_rank)


def _step_events(analysis: Analysis) -> Iterator[Event]:
    """Files of moetrace itself: the same picture that a store's run gives."""
    clocks, _ = group_clocks(analysis.joined)
    steps = [
        traced_step(joined, verdict)
        for joined, verdict in zip(analysis.joined, analysis.verdicts, strict=True)
    ]
    yield from step_events(steps, clocks)


def _drawn(analysis: Analysis) -> list[tuple[RankInput, ClockFit]]:
    return [(given, analysis.clocks.get(rank, SAME_CLOCK)) for rank, given in sorted(analysis.inputs.items())]


def _aligned(given: RankInput, clock: ClockFit) -> IntArray:
    return clock.to_reference(given.trace.device.start_ns + given.trace.base_unix_ns)


def _rank_events(given: RankInput, clock: ClockFit, origin: int, *, aligned: bool) -> Iterator[Event]:
    trace, phases, rank = given.trace, given.phases, given.trace.rank
    yield from process_names(rank, f"rank {rank}" if aligned else f"rank {rank} (own clock)", sort_index=rank)
    for stream in np.unique(trace.device.stream).tolist():
        yield from track_names(rank, stream, f"stream {stream}", sort_index=stream)
    starts = _aligned(given, clock)
    for row in range(len(trace.device)):
        code = int(phases.phase[row])
        phase = "" if code == OTHER else str(PHASE_BY_CODE[code])
        kernel = trace.names[int(trace.device.name[row])]
        said: dict[str, object] = {"kernel": kernel[:200]}
        if phase:
            said["layer"] = int(phases.layer[row])
        if phases.kind[row]:
            said["collective"] = phases.kind[row]
        where = Slice(
            process=rank,
            track=int(trace.device.stream[row]),
            start_ns=int(starts[row]) - origin,
            duration_ns=int(trace.device.duration_ns[row]),
        )
        yield slice_event(where, phase or kernel[:80], phase or "other", said)


def _collective_events(one: JoinedCollective, analysis: Analysis, origin: int, flow: int) -> Iterator[Event]:
    transfer = one.transfer_ns
    slices = {}
    for rank, mine in one.by_rank.items():
        start = _moved(mine, analysis.clocks.get(rank, SAME_CLOCK)) - origin
        wait = mine.duration_ns - transfer
        said = {"index": one.index, "releaser": one.releaser}
        if one.index == 0:
            yield from track_names(
                rank, COLLECTIVE_TRACK, "collectives: wait and transfer", sort_index=COLLECTIVE_TRACK
            )
        waited = Slice(process=rank, track=COLLECTIVE_TRACK, start_ns=start, duration_ns=wait)
        transferred = Slice(process=rank, track=COLLECTIVE_TRACK, start_ns=start + wait, duration_ns=transfer)
        if wait:
            yield slice_event(waited, f"wait for rank {one.releaser}", "wait", said)
        yield slice_event(transferred, f"{one.kind} transfer", "transfer", said)
        slices[rank] = (waited, transferred)
    for number, (rank, (waited, transferred)) in enumerate(slices.items()):
        if rank != one.releaser and waited.duration_ns >= LEAST_WAIT_NS:
            yield from arrow(flow + number, "released", slices[one.releaser][1], transferred)


def _moved(one: RankCollective, clock: ClockFit) -> int:
    return int(clock.to_reference(np.array([one.start_ns], dtype=np.int64))[0])
