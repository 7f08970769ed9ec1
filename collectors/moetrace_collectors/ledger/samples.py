"""What is compared: figures of every step, and of every request where serving records exist. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from moetrace_collectors.model import FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSamples:
    """Steps of one forward mode on one side of a comparison, in order of time; arrays [n]."""

    step: IntArray
    time_ns: IntArray
    """Unix time of the step's start."""
    step_ns: FloatArray
    rows: FloatArray
    """Rows that experts worked on, all ranks and layers: the size of the step; 0 = unknown."""
    pairs: FloatArray
    """(token, slot) pairs routed."""
    lost_pairs: FloatArray
    """Pairs dropped by capacity or with ids out of range."""
    sent_rows: FloatArray
    """Rows sent in exchanges whose both hosts are known."""
    cross_rows: FloatArray
    """Of those, to another host."""

    def __len__(self) -> int:
        return len(self.step)

    def select(self, chosen: BoolArray) -> StepSamples:
        """Some of the steps."""
        return StepSamples(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestSamples:
    """Served requests on one side, in order of time; arrays [n], NaN where a record does not tell."""

    ttft_ms: FloatArray
    """Time to first token."""
    tpot_ms: FloatArray
    """Time per output token."""
    failed: FloatArray
    """1 failed, 0 not."""

    def __len__(self) -> int:
        return len(self.failed)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """One side of a comparison."""

    label: str
    """For people: "version 3", "ranks 0-3", "run canary"."""
    version: int | None
    """Placement version, where the side is one."""
    steps: Mapping[str, StepSamples]
    """By forward mode."""
    requests: RequestSamples | None = None
    left_out: int = 0
    """Steps that were not taken: partial ones, and those that settled after the change."""
    notes: tuple[str, ...] = field(default=())


def at_the_same_time(one: Side, other: Side) -> tuple[Side, Side]:
    """Both sides over the time that they share: a canary runs beside what it is compared with."""
    spans = [
        (int(samples.time_ns.min()), int(samples.time_ns.max()))
        for side in (one, other)
        for samples in side.steps.values()
        if len(samples)
    ]
    if not spans:
        return one, other
    first, last = (
        max(_first(side) for side in (one, other)),
        min(_last(side) for side in (one, other)),
    )
    return _between(one, first, last), _between(other, first, last)


def _first(side: Side) -> int:
    return min((int(s.time_ns.min()) for s in side.steps.values() if len(s)), default=0)


def _last(side: Side) -> int:
    return max((int(s.time_ns.max()) for s in side.steps.values() if len(s)), default=0)


def _between(side: Side, first: int, last: int) -> Side:
    kept = {
        mode: samples.select((samples.time_ns >= first) & (samples.time_ns <= last))
        for mode, samples in side.steps.items()
    }
    dropped = sum(len(s) for s in side.steps.values()) - sum(len(s) for s in kept.values())
    return Side(
        label=side.label,
        version=side.version,
        steps=kept,
        requests=side.requests,
        left_out=side.left_out + dropped,
        notes=side.notes,
    )
