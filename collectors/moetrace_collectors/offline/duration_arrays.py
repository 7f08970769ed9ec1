"""NPZ of measured phase durations, `durations_ns` [rank, step, layer, phase] -> joined steps.

For people who time phases by hand: one array, no clocks. The names of the phase axis are an array
`phases` beside it; without one, an axis of six is read as outside, router, permute, dispatch,
expert_gemm, combine. Dispatch and combine are exchanges between all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moetrace_collectors.model import IntArray, JoinedStep, PhaseColumns, RankStep
from moetrace_collectors.offline.load_arrays import integers
from moetrace_collectors.offline.source import bad_file
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import PHASE_CODE, ClosedBy, ForwardMode, Phase

FORMAT = "phase_durations"
NAME = "durations_ns"
MAX_CELLS = 1 << 26
MAX_TOTAL_NS = 2**53
DEFAULT_PHASES = (
    Phase.OUTSIDE,
    Phase.ROUTER,
    Phase.PERMUTE,
    Phase.DISPATCH,
    Phase.EXPERT_GEMM,
    Phase.COMBINE,
)


def steps_of_durations(arrays: Mapping[str, npt.NDArray[Any]], path: Path) -> tuple[JoinedStep, ...]:
    """The steps in an archive that holds `durations_ns`.

    Raises:
        UsageError: another shape, unknown phases, or durations that are none.
    """
    durations = integers(arrays[NAME], path, NAME)
    if durations.ndim != 4 or 0 in durations.shape or durations.size > MAX_CELLS:
        raise bad_file(path, NAME, f"[rank, step, layer, phase] expected, got shape {durations.shape}")
    if int(durations.min()) < 0 or float(durations.sum(axis=(2, 3), dtype=np.float64).max()) > MAX_TOTAL_NS:
        raise bad_file(path, NAME, "nanoseconds of 0 or more expected")
    phases = _phases(arrays.get("phases"), durations.shape[3], path)
    ranks = len(durations)
    return tuple(
        JoinedStep(
            run_id=path.stem,
            step=step,
            world_size=ranks,
            rank_steps=tuple(
                _rank_step(path.stem, step, rank, ranks, durations[rank, step], phases)
                for rank in range(ranks)
            ),
            missing_ranks=(),
            closed_by=ClosedBy.COMPLETE,
        )
        for step in range(durations.shape[1])
    )


def _phases(names: npt.NDArray[Any] | None, count: int, path: Path) -> tuple[Phase, ...]:
    if names is None:
        if count != len(DEFAULT_PHASES):
            raise bad_file(path, NAME, f"array phases with {count} names expected beside it")
        return DEFAULT_PHASES
    try:
        phases = tuple(Phase(str(name)) for name in names.ravel().tolist())
    except ValueError as error:
        raise bad_file(path, "phases", f"names of phases expected ({error})") from error
    if len(phases) != count:
        raise bad_file(path, "phases", f"{count} names expected, got {len(phases)}")
    return phases


def _rank_step(
    run_id: str, step: int, rank: int, ranks: int, durations: IntArray, phases: tuple[Phase, ...]
) -> RankStep:
    layers = len(durations)
    code = np.tile(np.array([PHASE_CODE[phase] for phase in phases], dtype=np.int64), layers)
    exchange = np.isin(code, [PHASE_CODE[Phase.DISPATCH], PHASE_CODE[Phase.COMBINE]])
    duration = durations.ravel()
    zeros = np.zeros(len(code), dtype=np.int64)
    return RankStep(
        run_id=run_id,
        step=step,
        rank=rank,
        microbatch=0,
        world_size=ranks,
        ep_rank=rank,
        ep_size=ranks,
        ep_group=0,
        forward_mode=ForwardMode.MIXED,
        sample_period=1,
        warmup=False,
        clock="host",
        duration_ns=int(duration.sum()),
        start_unix_ns=0,
        phases=PhaseColumns(
            layer=np.repeat(np.arange(layers, dtype=np.int64), len(phases)),
            phase=code,
            direction=zeros,
            microbatch=zeros,
            ordinal=zeros,
            stream=zeros,
            flags=np.where(exchange, int(RowFlag.BARRIER), 0).astype(np.int64),
            start_offset_ns=np.cumsum(duration) - duration,
            duration_ns=duration,
            bytes=zeros - 1,
            rows=zeros - 1,
        ),
    )
