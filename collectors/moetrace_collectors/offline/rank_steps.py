"""Device rows of several ranks -> joined steps, as the verdict engine takes them. Pure.

Per rank and step, rows of one layer and phase that follow each other become one interval, and the time of
the step that no MoE row covers is `outside` (attention, norms, launch gaps), so that the intervals of the
compute stream fill the step::

    kernels     attn  topk  sort sort  a2a   gemm act gemm   a2a    scatter  attn
    rows      | outside|router|permute|dispatch|expert_gemm |combine|unpermute|outside|

Steps and ranks are joined by number. Which ranks share experts is read from the exchanges' process group;
where a trace does not tell it, all ranks of the job are taken to share them, and a job that is not all
here gives partial steps, which name no rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moetrace_collectors.model import IntArray, JoinedStep, PhaseColumns, RankStep
from moetrace_collectors.offline import intervals
from moetrace_collectors.offline.collectives import RankCollective
from moetrace_collectors.offline.phases import OTHER, DevicePhases, direction_of
from moetrace_collectors.offline.rank_trace import RankTrace
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import DIRECTION_CODE, PHASE_CODE, ClosedBy, Direction, ForwardMode, Phase

MAX_EXCHANGE_GAP_NS = 50_000
"""Parts of one exchange (counts first, then rows) that follow each other this closely are one interval."""
STEP_LEVEL = -1
_OUTSIDE = PHASE_CODE[Phase.OUTSIDE]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroup:
    """The ranks that share experts, as far as one rank's trace tells."""

    ranks: tuple[int, ...]
    """Empty where not told."""
    size: int
    """-1 where not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInput:
    """One rank's trace with what was recognised in it."""

    trace: RankTrace
    phases: DevicePhases
    collectives: Sequence[RankCollective]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interval:
    layer: int
    phase: int
    direction: int
    stream: int
    barrier: bool
    start_ns: int
    end_ns: int


def joined_steps(run_id: str, ranks: Mapping[int, RankInput]) -> tuple[JoinedStep, ...]:
    """Steps that at least two ranks exchanged rows in; empty where there is none."""
    with_exchange = {rank: given for rank, given in ranks.items() if given.phases.is_exchange.any()}
    if len(with_exchange) < 2:
        return ()
    told = [given.trace.world_size for given in ranks.values() if given.trace.world_size is not None]
    world_size = max([*told, max(ranks) + 1, len(ranks)])
    mode = ForwardMode.TRAIN if any(_trains(given) for given in ranks.values()) else ForwardMode.MIXED
    by_step: dict[int, list[RankStep]] = {}
    missing: dict[int, set[int]] = {}
    for rank, given in sorted(with_exchange.items()):
        group = _expert_group(given)
        known = group.ranks or (tuple(range(world_size)) if told else tuple(sorted(ranks)))
        size = max(len(known), group.size)
        for step in sorted(set(given.phases.step[given.phases.is_exchange].tolist()) - {OTHER}):
            rank_step = _rank_step(run_id, step, rank, given, known, size, world_size, mode)
            by_step.setdefault(step, []).append(rank_step)
            missing.setdefault(step, set()).update(set(known) - set(with_exchange))
    return tuple(
        JoinedStep(
            run_id=run_id,
            step=step,
            world_size=world_size,
            rank_steps=tuple(rank_steps),
            missing_ranks=tuple(
                sorted(missing[step] | (set(with_exchange) - {one.rank for one in rank_steps}))
            ),
            closed_by=ClosedBy.COMPLETE,
        )
        for step, rank_steps in sorted(by_step.items())
        if len(rank_steps) > 1
    )


def _trains(given: RankInput) -> bool:
    if (given.phases.direction == DIRECTION_CODE[Direction.BACKWARD]).any():
        return True
    return any(name.startswith("Optimizer.step") for name in given.trace.names)


def _expert_group(given: RankInput) -> ExpertGroup:
    """The group that most of the rank's exchanges went through."""
    exchange = given.phases.is_exchange
    seen = Counter((one.group[1], one.group_size) for one in given.collectives if exchange[one.row])
    if not seen:
        return ExpertGroup(ranks=(), size=-1)
    (ranks, size), _ = seen.most_common(1)[0]
    return ExpertGroup(ranks=ranks, size=size)


def _rank_step(
    run_id: str,
    step: int,
    rank: int,
    given: RankInput,
    known: tuple[int, ...],
    size: int,
    world_size: int,
    mode: ForwardMode,
) -> RankStep:
    device, phases = given.trace.device, given.phases
    rows = np.flatnonzero(phases.step == step)
    ends = device.start_ns[rows] + device.duration_ns[rows]
    start, stop = int(device.start_ns[rows].min()), int(ends.max())
    work = _merged(given, rows[phases.is_moe[rows]])
    filled = sorted(
        [*work, *_outside(work, start, stop)], key=lambda one: (one.start_ns, one.stream, one.end_ns)
    )
    return RankStep(
        run_id=run_id,
        step=step,
        rank=rank,
        microbatch=0,
        world_size=world_size,
        ep_rank=known.index(rank) if rank in known else 0,
        ep_size=size,
        ep_group=min(known),
        forward_mode=mode,
        sample_period=1,
        warmup=False,
        clock="cuda",
        duration_ns=stop - start,
        start_unix_ns=given.trace.base_unix_ns + start,
        phases=_columns(filled, start),
    )


def _merged(given: RankInput, rows: IntArray) -> list[_Interval]:
    """MoE rows of one step, those of one layer and phase that follow each other on a stream as one."""
    device, phases = given.trace.device, given.phases
    exchange = phases.is_exchange
    streams = _stream_numbers(given, rows, exchange)
    last: dict[int, int] = {}
    merged: list[_Interval] = []
    for row in rows.tolist():
        begin = int(device.start_ns[row])
        one = _Interval(
            layer=int(phases.layer[row]),
            phase=int(phases.phase[row]),
            direction=DIRECTION_CODE[direction_of(int(phases.direction[row]))],
            stream=streams[int(device.stream[row])],
            barrier=bool(exchange[row]),
            start_ns=begin,
            end_ns=begin + int(device.duration_ns[row]),
        )
        place = last.get(one.stream)
        if place is not None and _continues(merged[place], one):
            before = merged[place]
            merged[place] = replace(one, start_ns=before.start_ns, end_ns=max(before.end_ns, one.end_ns))
        else:
            last[one.stream] = len(merged)
            merged.append(one)
    return merged


def _continues(before: _Interval, one: _Interval) -> bool:
    same = (before.layer, before.phase, before.direction, before.barrier) == (
        one.layer,
        one.phase,
        one.direction,
        one.barrier,
    )
    return same and (not one.barrier or one.start_ns - before.end_ns <= MAX_EXCHANGE_GAP_NS)


def _stream_numbers(
    given: RankInput, rows: IntArray, exchange: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> dict[int, int]:
    """0 = the stream with most local MoE work; the others in order of use."""
    device = given.trace.device
    local: Counter[int] = Counter()
    for row in rows.tolist():
        local[int(device.stream[row])] += 0 if exchange[row] else int(device.duration_ns[row])
    ordered = sorted(local, key=lambda stream: (-local[stream], stream))
    return {stream: number for number, stream in enumerate(ordered)}


def _outside(work: Sequence[_Interval], start: int, stop: int) -> list[_Interval]:
    """What of the step no MoE interval covers; it counts to the layer that comes next."""
    if not work:
        return []
    starts = np.array([one.start_ns for one in work], dtype=np.int64)
    ends = np.array([one.end_ns for one in work], dtype=np.int64)
    free_starts, free_ends = intervals.subtract(
        np.array([start], dtype=np.int64), np.array([stop], dtype=np.int64), starts, ends
    )
    order = np.argsort(starts, kind="stable")
    ordered = starts[order]
    found = []
    for begin, end in zip(free_starts.tolist(), free_ends.tolist(), strict=True):
        following = int(np.searchsorted(ordered, end))
        nearest = work[int(order[min(following, len(order) - 1)])]
        found.append(
            _Interval(
                layer=nearest.layer if following < len(order) else STEP_LEVEL,
                phase=_OUTSIDE,
                direction=nearest.direction,
                stream=0,
                barrier=False,
                start_ns=begin,
                end_ns=end,
            )
        )
    return found


def _columns(filled: Sequence[_Interval], start: int) -> PhaseColumns:
    seen: Counter[tuple[int, int, int, bool]] = Counter()
    ordinals = []
    for one in filled:
        key = (one.layer, one.phase, one.direction, one.barrier)
        ordinals.append(seen[key])
        seen[key] += 1
    count = len(filled)
    unknown = np.full(count, -1, dtype=np.int64)

    def column(values: list[int]) -> IntArray:
        return np.array(values, dtype=np.int64)

    return PhaseColumns(
        layer=column([one.layer for one in filled]),
        phase=column([one.phase for one in filled]),
        direction=column([one.direction for one in filled]),
        microbatch=np.zeros(count, dtype=np.int64),
        ordinal=column(ordinals),
        stream=column([one.stream for one in filled]),
        flags=column([int(RowFlag.BARRIER) if one.barrier else 0 for one in filled]),
        start_offset_ns=column([one.start_ns - start for one in filled]),
        duration_ns=column([one.end_ns - one.start_ns for one in filled]),
        bytes=unknown,
        rows=unknown.copy(),
    )
