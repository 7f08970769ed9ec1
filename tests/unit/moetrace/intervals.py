"""Hand-drawn steps as intervals, and rows as short lines, so that a test reads like its timeline."""

from __future__ import annotations

from collections.abc import Iterable

from moetrace.record.exchanges import Interval
from moetrace.record.sites import Role, Site
from moetrace.record.types import PhaseRow
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Direction, Phase

EXCHANGE = Site(Role.EXCHANGE)
WAIT = Site(Role.WAIT)
GEMM = Site(Role.PHASE, Phase.EXPERT_GEMM)


def block(layer: int) -> Site:
    """A whole MoE block."""
    return Site(Role.LAYER, layer=layer)


def phase(name: str, layer: int | None = None) -> Site:
    """One wrapped phase."""
    return Site(Role.PHASE, Phase(name), layer)


def experts(layer: int, name: str = "fused") -> Site:
    """The experts' call; `name` is what it is called when it cannot be split."""
    return Site(Role.EXPERTS, Phase(name), layer)


def call(site: Site, start: int, end: int, flags: int = 0, ticket: int = 0) -> Interval:
    """One call."""
    return Interval(site, start, end, int(flags), ticket)


def launch(start: int, end: int, ticket: int = 1, flags: int = 0) -> Interval:
    """An exchange that returned at launch."""
    return Interval(EXCHANGE, start, end, int(RowFlag.ASYNC | flags), ticket)


def wait(start: int, end: int, ticket: int = 1) -> Interval:
    """The wait for it."""
    return Interval(WAIT, start, end, 0, ticket)


def lines(rows: Iterable[PhaseRow]) -> list[str]:
    """Rows as `layer phase start-end [backward] [flags]`."""
    result = []
    for row in rows:
        words = [
            str(row.layer),
            row.phase.value,
            f"{row.start_offset_ns}-{row.start_offset_ns + row.duration_ns}",
        ]
        if row.direction is Direction.BACKWARD:
            words.append("backward")
        words += [flag.name.lower() for flag in RowFlag if row.flags & flag and flag.name]
        result.append(" ".join(words))
    return result
