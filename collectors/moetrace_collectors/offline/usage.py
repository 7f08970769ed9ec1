"""Where one rank's device time went: by phase, busy, idle, communication that nothing hid. Pure.

::

    stream 0   |== kernel ==|   |= kernel =|
    stream 1        |== all-to-all ==|
    busy       |======================| .      union over all streams
    exposed                 |==|   |=|         communication while no kernel computes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.offline import intervals
from moetrace_collectors.offline.phases import OTHER, DevicePhases
from moetrace_collectors.offline.rank_trace import DeviceKind, RankTrace
from moetrace_schemas.enums import PHASE_BY_CODE

COMMUNICATION = "communication"
"""Collectives that are part of no MoE phase."""
MEMCPY, MEMSET, OTHER_KERNELS = "memcpy", "memset", "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """Device rows of one phase and their summed time; rows that run at once count each for themselves."""

    kernels: int
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUsage:
    """One rank's device time."""

    rank: int
    phases: Mapping[str, PhaseTime]
    """MoE phases in the order of a layer, then communication, copies and other kernels; absent = none."""
    busy_ns: int
    idle_ns: int
    """From the first row's start to the last row's end, less busy."""
    exposed_communication_ns: int
    moe_layers: int
    """Most MoE layers seen in one step; 0 where no MoE phase was recognised."""


def rank_usage(trace: RankTrace, phases: DevicePhases) -> RankUsage:
    """Usage of one rank over its whole trace."""
    device = trace.device
    starts, ends = device.start_ns, device.start_ns + device.duration_ns
    busy = intervals.length(starts, ends)
    total = int(ends.max() - starts.min()) if len(device) else 0
    talks = phases.communicates
    computes = (device.kind == DeviceKind.KERNEL) & ~talks
    exposed = intervals.subtract(starts[talks], ends[talks], starts[computes], ends[computes])
    layers = 0
    moe = phases.is_moe
    for step in np.unique(phases.step[moe]).tolist():
        layers = max(layers, len(np.unique(phases.layer[moe & (phases.step == step)])))
    return RankUsage(
        rank=trace.rank,
        phases=_phase_times(trace, phases),
        busy_ns=busy,
        idle_ns=total - busy,
        exposed_communication_ns=int((exposed[1] - exposed[0]).sum()),
        moe_layers=layers,
    )


def _phase_times(trace: RankTrace, phases: DevicePhases) -> dict[str, PhaseTime]:
    device = trace.device
    times: dict[str, PhaseTime] = {}
    for code, phase in PHASE_BY_CODE.items():
        _put(times, str(phase), phases.phase == code, device.duration_ns)
    rest = phases.phase == OTHER
    is_kernel = device.kind == DeviceKind.KERNEL
    _put(times, COMMUNICATION, rest & phases.communicates, device.duration_ns)
    _put(times, MEMCPY, rest & (device.kind == DeviceKind.MEMCPY), device.duration_ns)
    _put(times, MEMSET, rest & (device.kind == DeviceKind.MEMSET), device.duration_ns)
    _put(times, OTHER_KERNELS, rest & is_kernel & ~phases.communicates, device.duration_ns)
    return times


def _put(
    times: dict[str, PhaseTime],
    name: str,
    rows: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    duration_ns: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> None:
    if rows.any():
        times[name] = PhaseTime(kernels=int(rows.sum()), duration_ns=int(duration_ns[rows].sum()))
