"""Hand-drawn steps as intervals, and rows as short lines, so that a test reads like its timeline."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from moetrace.record.backward import BACKWARD
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


SITES = [
    block(0),
    block(1),
    EXCHANGE,
    Site(Role.WAIT),
    GEMM,
    experts(0),
    experts(1, "expert_gemm"),
    *(phase(name, layer) for name in ("router", "permute", "dispatch", "combine") for layer in (None, 0, 1)),
    Site(Role.PHASE, Phase.SCHEDULE, alone=True),
    phase("shared_expert", 1),
]


@st.composite
def nested(draw: st.DrawFn) -> tuple[list[Interval], int, int]:
    """Calls that nest, as one thread makes them."""
    result: list[Interval] = []

    def fill(low: int, high: int, depth: int) -> None:
        cursor = low
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(cursor, high))
            end = draw(st.integers(start, high))
            flags = draw(st.sampled_from([0, 0, 0, 2, 8, 16, BACKWARD]))
            result.append(Interval(draw(st.sampled_from(SITES)), start, end, flags, draw(st.integers(0, 3))))
            if depth:
                fill(start, end, depth - 1)
            cursor = end

    start, length = draw(st.integers(-1000, 1000)), draw(st.integers(0, 2000))
    fill(start, start + length, 3)
    return result, start, start + length


@st.composite
def messy(draw: st.DrawFn) -> tuple[list[Interval], int, int]:
    """Anything: calls that overlap, end before they start, or lie outside the step."""
    numbers = st.integers(-100, 300)
    intervals = draw(
        st.lists(
            st.builds(
                Interval,
                st.sampled_from(SITES),
                numbers,
                numbers,
                st.one_of(st.integers(0, 31), st.just(BACKWARD)),
                st.integers(0, 3),
                st.just(0),
            ),
            max_size=25,
        )
    )
    return intervals, 0, draw(st.integers(0, 200))
