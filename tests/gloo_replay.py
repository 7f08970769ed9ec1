"""Recorded gloo runs with a known injected delay (tests/data/gloo_runs) as joined steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moetrace_collectors.model import JoinedStep, PhaseColumns, RankStep
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import PHASE_CODE, ClosedBy, ForwardMode, Phase

DIRECTORY = Path(__file__).parent / "data" / "gloo_runs"
WARMUP_STEPS = 5


def cases() -> dict[str, dict[str, Any]]:
    """Name of a run -> its ranks, phases and what was injected."""
    loaded: dict[str, dict[str, Any]] = json.loads((DIRECTORY / "cases.json").read_text())
    return loaded


def joined_steps(name: str) -> Iterator[JoinedStep]:
    """The steps of one recorded run in order, warm-up steps marked."""
    with np.load(DIRECTORY / f"{name}.npz") as archive:
        durations = archive["durations_ns"]
    phases = [Phase(phase) for phase in cases()[name]["phases"]]
    for step in range(durations.shape[1]):
        yield JoinedStep(
            run_id=name,
            step=step,
            world_size=len(durations),
            rank_steps=tuple(
                _rank_step(name, step, rank, durations[:, step], phases) for rank in range(len(durations))
            ),
            missing_ranks=(),
            closed_by=ClosedBy.COMPLETE,
        )


def _rank_step(
    name: str, step: int, rank: int, durations: npt.NDArray[np.int64], phases: list[Phase]
) -> RankStep:
    num_ranks, num_layers, num_phases = durations.shape
    code = np.tile([PHASE_CODE[phase] for phase in phases], num_layers)
    exchange = np.isin(code, [PHASE_CODE[Phase.DISPATCH], PHASE_CODE[Phase.COMBINE]])
    duration = durations[rank].ravel().astype(np.int64)
    zeros = np.zeros(len(code), dtype=np.int64)
    columns = PhaseColumns(
        layer=np.repeat(np.arange(num_layers), num_phases),
        phase=code,
        direction=zeros,
        microbatch=zeros,
        ordinal=zeros,
        stream=zeros,
        flags=np.where(exchange, int(RowFlag.BARRIER), 0),
        start_offset_ns=np.cumsum(duration) - duration,
        duration_ns=duration,
        bytes=zeros - 1,
        rows=zeros - 1,
    )
    return RankStep(
        run_id=name,
        step=step,
        rank=rank,
        microbatch=0,
        world_size=num_ranks,
        ep_rank=rank,
        ep_size=num_ranks,
        ep_group=0,
        forward_mode=ForwardMode.TRAIN,
        sample_period=1,
        warmup=step < WARMUP_STEPS,
        clock="host",
        duration_ns=int(duration.sum()),
        start_unix_ns=0,
        phases=columns,
    )
