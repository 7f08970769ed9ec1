"""Phase rows of a rank step one by one, as plain Python values: taken out of their arrays once. Pure."""

from __future__ import annotations

from typing import NamedTuple

from moetrace_collectors.model import RankStep
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import DIRECTION_BY_CODE, PHASE_BY_CODE, Direction, Phase

_BARRIER = int(RowFlag.BARRIER)
_ERROR = int(RowFlag.ERROR)


class PhaseRow(NamedTuple):
    """One phase row. A tuple and no dataclass: a step of a large job has a million of them."""

    layer: int
    phase: Phase
    direction: Direction
    microbatch: int
    """As the row says it."""
    ordinal: int
    stream: int
    flags: int
    start_offset_ns: int
    duration_ns: int
    bytes: int
    """-1 = unknown."""
    rows: int
    """-1 = unknown."""

    @property
    def is_barrier(self) -> bool:
        """Whether it is an exchange."""
        return bool(self.flags & _BARRIER)

    @property
    def is_error(self) -> bool:
        """Whether the model raised inside it."""
        return bool(self.flags & _ERROR)


def rows_of(one: RankStep) -> list[PhaseRow]:
    """All rows of a rank step, in their order."""
    columns = one.phases
    return [
        PhaseRow(layer, PHASE_BY_CODE[phase], DIRECTION_BY_CODE[direction], *rest)
        for layer, phase, direction, *rest in zip(
            columns.layer.tolist(),
            columns.phase.tolist(),
            columns.direction.tolist(),
            columns.microbatch.tolist(),
            columns.ordinal.tolist(),
            columns.stream.tolist(),
            columns.flags.tolist(),
            columns.start_offset_ns.tolist(),
            columns.duration_ns.tolist(),
            columns.bytes.tolist(),
            columns.rows.tolist(),
            strict=True,
        )
    ]
