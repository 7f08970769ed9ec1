"""The analysis as a Chrome trace that Perfetto and chrome://tracing open: ranks on one clock. Pure.

One process per rank. Its streams show the device rows under their MoE phase (or, for files that hold steps
and no kernels, the phases themselves); a track of its own shows each joined collective cut into wait and
transfer, with arrows from the rank that released it to those that waited. Ranks whose clock could not be
aligned are drawn by their own clock, and their process name says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from moetrace_collectors.align import SAME_CLOCK, ClockFit
from moetrace_collectors.model import IntArray
from moetrace_collectors.offline.analysis import Analysis
from moetrace_collectors.offline.collectives import JoinedCollective, RankCollective
from moetrace_collectors.offline.phases import OTHER
from moetrace_collectors.offline.rank_steps import RankInput
from moetrace_schemas.enums import PHASE_BY_CODE

COLLECTIVE_TRACK = 1_000_000
"""Track number of a rank's collectives, past any stream."""
LEAST_WAIT_NS = 1_000
"""Shorter waits get no arrow."""


def write_perfetto(analysis: Analysis, out: IO[str]) -> int:
    """Write the trace; returns the number of events."""
    count = 0
    out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    for event in _events(analysis):
        out.write(("," if count else "") + json.dumps(event, separators=(",", ":"), allow_nan=False) + "\n")
        count += 1
    out.write("]}\n")
    return count


def _events(analysis: Analysis) -> Iterator[dict[str, Any]]:
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

    if not analysis.inputs:
        yield from _step_events(analysis)


def _step_events(analysis: Analysis) -> Iterator[dict[str, Any]]:
    """Phases of joined steps. Steps without clocks (all begin at 0) are laid one after the other."""
    everyone = [one for step in analysis.joined for one in step.rank_steps]
    origin = min((one.start_unix_ns for one in everyone), default=0)
    has_clocks = any(one.start_unix_ns for one in everyone)
    shift = 0
    for rank in sorted({one.rank for one in everyone}):
        name = f"rank {rank}" if rank in analysis.clocks else f"rank {rank} (own clock)"
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
    for step in analysis.joined:
        for one in step.rank_steps:
            rows = one.phases
            clock = analysis.clocks.get(one.rank, SAME_CLOCK)
            starts = clock.to_reference(one.start_unix_ns + rows.start_offset_ns) - origin + shift
            for row in range(len(rows)):
                phase = str(PHASE_BY_CODE[int(rows.phase[row])])
                yield {
                    "ph": "X",
                    "pid": one.rank,
                    "tid": int(rows.stream[row]),
                    "name": phase,
                    "cat": phase,
                    "ts": _us(int(starts[row])),
                    "dur": _us(int(rows.duration_ns[row])),
                    "args": {"step": one.step, "layer": int(rows.layer[row])},
                }
        if not has_clocks:
            shift += max(one.duration_ns for one in step.rank_steps)


def _drawn(analysis: Analysis) -> list[tuple[RankInput, ClockFit]]:
    return [(given, analysis.clocks.get(rank, SAME_CLOCK)) for rank, given in sorted(analysis.inputs.items())]


def _aligned(given: RankInput, clock: ClockFit) -> IntArray:
    return clock.to_reference(given.trace.device.start_ns + given.trace.base_unix_ns)


def _rank_events(
    given: RankInput, clock: ClockFit, origin: int, *, aligned: bool
) -> Iterator[dict[str, Any]]:
    trace, phases, rank = given.trace, given.phases, given.trace.rank
    name = f"rank {rank}" if aligned else f"rank {rank} (own clock)"
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for stream in np.unique(trace.device.stream).tolist():
        yield _thread_name(rank, stream, f"stream {stream}")
    starts = _aligned(given, clock)
    for row in range(len(trace.device)):
        code = int(phases.phase[row])
        phase = "" if code == OTHER else str(PHASE_BY_CODE[code])
        kernel = trace.names[int(trace.device.name[row])]
        args: dict[str, Any] = {"kernel": kernel[:200]}
        if phase:
            args["layer"] = int(phases.layer[row])
        if phases.kind[row]:
            args["collective"] = phases.kind[row]
        yield {
            "ph": "X",
            "pid": rank,
            "tid": int(trace.device.stream[row]),
            "name": phase or kernel[:80],
            "cat": phase or "other",
            "ts": _us(int(starts[row]) - origin),
            "dur": _us(int(trace.device.duration_ns[row])),
            "args": args,
        }


def _collective_events(
    one: JoinedCollective, analysis: Analysis, origin: int, flow: int
) -> Iterator[dict[str, Any]]:
    transfer = one.transfer_ns
    releaser = one.by_rank[one.releaser]
    for number, (rank, mine) in enumerate(one.by_rank.items()):
        clock = analysis.clocks.get(rank, SAME_CLOCK)
        start = _moved(mine, clock) - origin
        wait = mine.duration_ns - transfer
        if one.index == 0:
            yield _thread_name(rank, COLLECTIVE_TRACK, "collectives: wait and transfer")
        if wait:
            yield _slice(rank, f"wait for rank {one.releaser}", "wait", start, wait, one)
        yield _slice(rank, f"{one.kind} transfer", "transfer", start + wait, transfer, one)
        if rank != one.releaser and wait >= LEAST_WAIT_NS:
            released = _moved(releaser, analysis.clocks.get(one.releaser, SAME_CLOCK)) - origin
            arrow = {"cat": "release", "name": "released", "id": flow + number}
            yield {"ph": "s", "pid": one.releaser, "tid": COLLECTIVE_TRACK, "ts": _us(released), **arrow}
            yield {
                "ph": "f",
                "bp": "e",
                "pid": rank,
                "tid": COLLECTIVE_TRACK,
                "ts": _us(start + wait),
                **arrow,
            }


def _moved(one: RankCollective, clock: ClockFit) -> int:
    return int(clock.to_reference(np.array([one.start_ns], dtype=np.int64))[0])


def _slice(
    rank: int, name: str, category: str, start: int, duration: int, one: JoinedCollective
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": COLLECTIVE_TRACK,
        "name": name,
        "cat": category,
        "ts": _us(start),
        "dur": _us(duration),
        "args": {"index": one.index, "releaser": one.releaser},
    }


def _thread_name(rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}


def _us(duration_ns: int) -> float:
    return round(duration_ns / 1000, 3)
