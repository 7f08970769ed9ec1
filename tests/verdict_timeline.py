"""Hand-drawn steps for verdict tests: rows as people draw them, without a simulator in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import ExpertCounts, JoinedStep, PhaseColumns, RankStep
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import (
    COUNT_KIND_CODE,
    DIRECTION_CODE,
    PHASE_CODE,
    ClosedBy,
    CountKind,
    Direction,
    ForwardMode,
    Phase,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One interval; `start` None = when the row before it ends."""

    phase: Phase
    duration: int
    layer: int = 0
    exchange: bool = False
    direction: Direction = Direction.FORWARD
    microbatch: int = 0
    ordinal: int = 0
    stream: int = 0
    start: int | None = None
    bytes: int = -1
    rows: int = -1


def work(phase: Phase, duration: int, layer: int = 0, **more: object) -> Row:
    """Local work."""
    return Row(phase=phase, duration=duration, layer=layer, **more)  # type: ignore[arg-type]


def exchange(phase: Phase, duration: int, layer: int = 0, **more: object) -> Row:
    """Time inside an exchange: transfer plus wait."""
    return Row(phase=phase, duration=duration, layer=layer, exchange=True, **more)  # type: ignore[arg-type]


def rank_step(
    rank: int,
    rows: Sequence[Row],
    *,
    ep_size: int = 2,
    ep_group: int = 0,
    world_size: int | None = None,
    step: int = 0,
    microbatch: int = 0,
    start_unix_ns: int = 0,
    warmup: bool = False,
    forward_mode: ForwardMode = ForwardMode.TRAIN,
    received: dict[int, Sequence[int]] | None = None,
    run_id: str = "drawn",
) -> RankStep:
    """One rank's rows as a record; rows on one stream follow each other unless they say when they start."""
    starts, now = [], 0
    for row in rows:
        start = now if row.start is None else row.start
        starts.append(start)
        if row.stream == 0:
            now = start + row.duration

    def column(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(values, dtype=np.int64)

    return RankStep(
        run_id=run_id,
        step=step,
        rank=rank,
        microbatch=microbatch,
        world_size=world_size or ep_size,
        ep_rank=rank % ep_size,
        ep_size=ep_size,
        ep_group=ep_group,
        forward_mode=forward_mode,
        sample_period=1,
        warmup=warmup,
        clock="host",
        duration_ns=now,
        start_unix_ns=start_unix_ns,
        phases=PhaseColumns(
            layer=column([row.layer for row in rows]),
            phase=column([PHASE_CODE[row.phase] for row in rows]),
            direction=column([DIRECTION_CODE[row.direction] for row in rows]),
            microbatch=column([row.microbatch for row in rows]),
            ordinal=column([row.ordinal for row in rows]),
            stream=column([row.stream for row in rows]),
            flags=column([int(RowFlag.BARRIER) if row.exchange else 0 for row in rows]),
            start_offset_ns=column(starts),
            duration_ns=column([row.duration for row in rows]),
            bytes=column([row.bytes for row in rows]),
            rows=column([row.rows for row in rows]),
        ),
        experts=tuple(
            ExpertCounts(layer=layer, kind=COUNT_KIND_CODE[CountKind.RECEIVED], counts=column(counts))
            for layer, counts in (received or {}).items()
        ),
    )


def joined(*rank_steps: RankStep, missing: Sequence[int] = ()) -> JoinedStep:
    """The records of one step, joined."""
    first = rank_steps[0]
    return JoinedStep(
        run_id=first.run_id,
        step=first.step,
        world_size=max(first.world_size, len({r.rank for r in rank_steps}) + len(missing)),
        rank_steps=tuple(sorted(rank_steps, key=lambda r: (r.rank, r.microbatch))),
        missing_ranks=tuple(missing),
        closed_by=ClosedBy.TIMEOUT if missing else ClosedBy.COMPLETE,
    )


def layer_rows(layer: int, outside: int, gemm: int, waits: tuple[int, int], transfer: int = 10) -> list[Row]:
    """The usual four rows of one layer; `waits` are those inside dispatch and combine."""
    return [
        work(Phase.OUTSIDE, outside, layer),
        exchange(Phase.DISPATCH, waits[0] + transfer, layer),
        work(Phase.EXPERT_GEMM, gemm, layer),
        exchange(Phase.COMBINE, waits[1] + transfer, layer),
    ]
