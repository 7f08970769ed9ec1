"""One rank's trace as columns: what every reader of traces returns and every later stage reads. No logic.

Times are integer nanoseconds by the trace's own clock. `base_unix_ns` turns them into unix time, which
serves alignment and drawing only. Names are kept once, in `names`; rows hold their index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from moetrace_collectors.model import IntArray

NO_CORRELATION = -1
MAX_RANKS = 65_536
"""Ranks and world sizes from here on are not believed."""


class DeviceKind(IntEnum):
    """What a device did."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Kernels and copies, in order of start."""

    start_ns: IntArray
    duration_ns: IntArray
    name: IntArray
    stream: IntArray
    """Index of the (device, stream) pair, in order of first use."""
    kind: IntArray
    """Values of DeviceKind."""
    correlation: IntArray
    """Key of the launching runtime call; -1 = none."""
    detail: IntArray
    """Index into `RankTrace.collectives`; -1 = none."""

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRows:
    """Runtime and driver calls with a correlation, in order of correlation; each correlation once."""

    correlation: IntArray
    start_ns: IntArray
    thread: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationRows:
    """Intervals that the program marked on its threads, in order of start."""

    start_ns: IntArray
    duration_ns: IntArray
    name: IntArray
    thread: IntArray

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveDetail:
    """What a trace tells of one collective beside its kernel's name; empty or -1 where it does not."""

    name: str = ""
    group: str = ""
    """Name of the process group."""
    group_ranks: tuple[int, ...] = ()
    group_size: int = -1
    sequence: int = -1
    elements: int = -1
    """Elements this rank put in."""
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """All that is kept of one rank's trace file."""

    source: str
    format: str
    rank: int
    rank_told: bool
    """False where the file does not say and a number was given to it."""
    world_size: int | None
    names: tuple[str, ...]
    device: DeviceRows
    launches: LaunchRows
    annotations: AnnotationRows
    collectives: tuple[CollectiveDetail, ...] = ()
    base_unix_ns: int = 0
    events: int = 0
    """Events in the file, of any kind."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Events that could not be used, by reason."""
