"""Joined steps as Chrome trace events, read back by a strict reader."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.traces.exchanges import exchanges_of
from moetrace_collectors.traces.joined_steps import traced_step
from moetrace_collectors.traces.step_choice import StepChoice, parse_steps
from moetrace_collectors.traces.step_clocks import group_clocks
from moetrace_collectors.traces.step_records import TracedStep
from moetrace_collectors.traces.step_trace import LEAST_WAIT_NS, LOAD_PROCESS, step_events
from moetrace_collectors.traces.trace_events import Slice, arrow, open_trace, write_events
from moetrace_collectors.verdict import VerdictEngine
from moetrace_schemas.enums import ClosedBy
from trace_event_reader import Trace, checked, read_trace

RUN = SyntheticRun(slow_rank=2, slow_layer=1, slow_ns=3_000_000)
STEPS = range(5, 9)


def traced(rank_steps: Sequence[Sequence[RankStep]]) -> list[TracedStep]:
    """Judged steps."""
    engine = VerdictEngine()
    steps = [
        JoinedStep(
            run_id=ranks[0].run_id,
            step=ranks[0].step,
            world_size=ranks[0].world_size,
            rank_steps=tuple(ranks),
            missing_ranks=(),
            closed_by=ClosedBy.COMPLETE,
        )
        for ranks in rank_steps
    ]
    return [traced_step(step, engine.judge(step)) for step in steps]


def drawn(steps: list[TracedStep]) -> Trace:
    """The trace of these steps, checked."""
    clocks, _ = group_clocks([step.joined for step in steps])
    out = io.StringIO()
    write_events(step_events(steps, clocks), out)
    return checked(json.loads(out.getvalue())["traceEvents"])


def test_every_row_is_drawn_and_waits_are_apart_from_work() -> None:
    """Per rank: its steps, its work by phase, and of each exchange wait and transfer that add up to it."""
    steps = traced([RUN.step(step) for step in STEPS])
    trace = drawn(steps)
    assert trace.processes[2] == "rank 2 on host-0"
    assert trace.tracks[2, 0] == "compute stream"
    for rank in range(RUN.world_size):
        names = [one["name"] for one in trace.of("step", rank)]
        assert names == [f"step {step}" for step in STEPS]
        rows = [one for step in steps for one in step.joined.rank_steps if one.rank == rank]
        exchanged_ns = sum(int(one.phases.duration_ns[one.phases.flags & 1 == 1].sum()) for one in rows)
        drawn_us = sum(s["dur"] for s in (*trace.of("wait", rank), *trace.of("transfer", rank)))
        assert round(drawn_us * 1000) == exchanged_ns
        worked_ns = sum(int(one.phases.duration_ns[one.phases.flags & 1 == 0].sum()) for one in rows)
        others = {"step", "wait", "transfer"}
        work = [s for s in trace.slices if s["pid"] == rank and s["cat"] not in others]
        assert round(sum(s["dur"] for s in work) * 1000) == worked_ns
    waits = {one["name"] for one in trace.of("wait", 0) if one["args"]["layer"] == 1}
    assert "combine: wait for rank 2" in waits


def test_arrows_lead_from_the_releaser_to_those_that_waited() -> None:
    """One arrow per rank that waited a microsecond or more, from the releaser's transfer into its own."""
    steps = traced([RUN.step(step) for step in STEPS])
    trace = drawn(steps)
    expected = sum(
        participant.wait_ns >= LEAST_WAIT_NS and rank != exchange.releaser_rank
        for step in steps
        for exchange in exchanges_of(step)
        for rank, participant in exchange.participants.items()
        if exchange.releaser is not None
    )
    assert len(trace.arrows) == expected > 0
    for one in trace.arrows:
        assert one.source["cat"] == one.target["cat"] == "transfer"
        assert one.source["pid"] == one.target["args"]["releaser"]
    slow = [one for one in trace.arrows if one.source["name"] == "combine: transfer"]
    slow = [one for one in slow if one.source["args"]["layer"] == 1]
    assert {one.source["pid"] for one in slow} == {2}
    assert {one.target["pid"] for one in slow} == {0, 1, 3}


def test_a_rank_whose_clock_others_are_drawn_by_says_how_far_off_it_may_be() -> None:
    """The worst of its steps, where device events were tied to unix time; nothing by the host's own clock."""
    steps = traced(
        [
            [replace(one, anchor_error_ns=1_000 * step if one.rank < 2 else -1) for one in RUN.step(step)]
            for step in STEPS
        ]
    )
    processes = drawn(steps).processes
    assert processes[0] == "rank 0 on host-0 (device time, placed within 8.0 us)"
    assert processes[1] == "rank 1 on host-0"
    assert processes[2] == "rank 2 on host-0"


def test_clocks_that_are_wrong_are_laid_over_each_other() -> None:
    """With clocks 3 s ahead and 2 ms behind, ends of one exchange still meet, and no duration changes."""
    wrong_ns = {0: 0, 1: 3_000_000_000, 2: -2_000_000, 3: 0}
    steps = traced(
        [
            [replace(one, start_unix_ns=one.start_unix_ns + wrong_ns[one.rank]) for one in RUN.step(step)]
            for step in STEPS
        ]
    )
    trace = drawn(steps)
    straight = drawn(traced([RUN.step(step) for step in STEPS]))
    ends: dict[tuple[object, ...], list[float]] = {}
    for one in trace.slices:
        if one["cat"] == "transfer":
            key = (one["args"]["step"], one["args"]["layer"], one["name"])
            ends.setdefault(key, []).append(one["ts"] + one["dur"])
    assert len(ends) == len(STEPS) * RUN.num_layers * 2
    assert all(max(at) - min(at) < 1 for at in ends.values())
    assert sorted(one["dur"] for one in trace.slices) == sorted(one["dur"] for one in straight.slices)
    assert len(trace.arrows) == len(straight.arrows)


def uneven(steps: range, *, base_ns: int, scatter_ns: int, host: str = "host-0") -> list[TracedStep]:
    """Steps, a second apart, of which rank 3's clock is off by the base and by up to the scatter more."""

    def moved(one: RankStep) -> RankStep:
        second = replace(one, start_unix_ns=one.start_unix_ns + one.step * 10**9)
        if one.rank != 3:
            return second
        off_ns = base_ns + scatter_ns * (one.step * one.step % 7) // 4
        return replace(second, start_unix_ns=second.start_unix_ns + off_ns, host_name=host)

    return traced([[moved(one) for one in RUN.step(step)] for step in steps])


def test_a_clock_that_cannot_be_aligned_is_said() -> None:
    """A rank whose exchange ends contradict each other is drawn by its own clock, and its name says so.

    On the host of the group's lowest rank that is the same clock, and there is nothing to say: a loaded host
    scatters the ends by more than a short exchange lasts.
    """
    many = range(5, 19)
    elsewhere, here = (uneven(many, base_ns=0, scatter_ns=15_000_000, host=f"host-{host}") for host in (1, 0))
    trace = drawn(elsewhere)
    assert trace.processes[3] == "rank 3 on host-1 (own clock)"
    assert trace.processes[1] == "rank 1 on host-0"
    _, warnings = group_clocks([step.joined for step in elsewhere])
    assert len(warnings) == 1
    assert warnings[0].startswith("the clock of rank 3 is not aligned")
    assert drawn(here).processes[3] == "rank 3 on host-0"
    assert group_clocks([step.joined for step in here])[1] == []


@pytest.mark.parametrize("base_ns", [3_600 * 10**9, 2 * 10**9, -2 * 10**9, 60_000_000])
def test_one_host_name_with_two_clocks_is_said(base_ns: int) -> None:
    """Ends farther apart than exchanges last, and not evenly, are no load: one host name, two clocks."""
    steps = uneven(range(5, 19), base_ns=base_ns, scatter_ns=15_000_000)
    assert drawn(steps).processes[3] == "rank 3 on host-0 (own clock)"
    _, warnings = group_clocks([step.joined for step in steps])
    assert [line.startswith("the clock of rank 3 is not aligned") for line in warnings] == [True]


def test_long_exchanges_may_end_far_apart_on_one_clock() -> None:
    """A rank that leaves an exchange of half a second 0.3 s after the others was in it all the while."""
    steps = uneven(range(5, 19), base_ns=300_000_000, scatter_ns=15_000_000)
    assert drawn(steps).processes[3] == "rank 3 on host-0 (own clock)"
    longer = [
        replace(
            step.joined,
            rank_steps=tuple(
                replace(one, phases=replace(one.phases, duration_ns=one.phases.duration_ns + 500_000_000))
                for one in step.joined.rank_steps
            ),
        )
        for step in steps
    ]
    clocks, warnings = group_clocks(longer)
    assert (clocks[3].reference_rank, warnings) == (0, [])


def test_groups_keep_their_own_clock() -> None:
    """Expert-parallel groups share no exchange: the second is drawn by the clock of its lowest rank."""
    steps = traced(
        [
            [*RUN.step(step), *(replace(one, rank=one.rank + 4, ep_group=4) for one in RUN.step(step))]
            for step in STEPS
        ]
    )
    steps = [replace(step, joined=replace(step.joined, world_size=8)) for step in steps]
    trace = drawn(steps)
    assert trace.processes[4] == "rank 4 on host-0 (own clock)"
    assert trace.processes[5] == "rank 5 on host-0 (clock of rank 4)"


def test_load_is_counted_per_rank_and_layer() -> None:
    """A counter of received rows per rank, and of max / mean per layer, one value per step."""
    steps = traced([RUN.step(step) for step in STEPS])
    trace = drawn(steps)
    received = [one["args"]["value"] for one in trace.counters if one["pid"] == 1]
    assert received == [step.received_rows[1] for step in steps]
    layers = {one["name"] for one in trace.counters if one["pid"] == LOAD_PROCESS}
    assert layers == {"layer 0, train", "layer 1, train"}


def test_no_events_are_lost_where_a_step_is_empty() -> None:
    """A rank step without phase rows has its step slice and nothing else."""
    empty = RUN.step(5)[0]
    none = replace(
        empty.phases,
        **{name: np.zeros(0, dtype=np.int64) for name in type(empty.phases).__dataclass_fields__},
    )
    trace = drawn(traced([[replace(empty, phases=none, world_size=1, ep_size=1)]]))
    assert [one["name"] for one in trace.slices] == ["step 5"]


def test_an_arrow_never_points_back_and_never_leaves_its_slices() -> None:
    """Where aligned clocks disagree the end moves later inside the target; where it cannot, there is none."""

    def where(process: int, start: int, duration: int) -> Slice:
        return Slice(process=process, track=0, start_ns=start, duration_ns=duration)

    begin, end = arrow(7, "released", where(0, 1000, 500), where(1, 900, 500))
    assert (begin["ts"], end["ts"]) == (1.0, 1.0)
    assert arrow(7, "released", where(0, 2000, 500), where(1, 900, 500)) == ()
    assert arrow(7, "released", where(0, 1000, 0), where(1, 1000, 500)) == ()


def test_a_file_is_compressed_where_its_name_says_so(tmp_path: Path) -> None:
    """The same events, byte for byte the same file each time; plain otherwise."""
    steps = traced([RUN.step(5)])
    clocks, _ = group_clocks([step.joined for step in steps])
    for name in ("a.json", "b.json.gz", "c.json.gz"):
        temporary = tmp_path / f".{name}.new"
        with open_trace(temporary, named=tmp_path / name) as out:
            write_events(step_events(steps, clocks), out)
        temporary.replace(tmp_path / name)
    packed = (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "a.json").read_bytes()
    assert packed == (tmp_path / "c.json.gz").read_bytes()
    assert read_trace(tmp_path / "b.json.gz").slices


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("slow", StepChoice(slow=10)),
        ("slow:3", StepChoice(slow=3)),
        ("5,7,10-20", StepChoice(ranges=((5, 5), (7, 7), (10, 20)))),
        ("all", StepChoice(ranges=((0, 2**62),))),
    ],
)
def test_steps_are_chosen_by_cost_or_number(text: str, choice: StepChoice) -> None:
    """Every form that the help names."""
    assert parse_steps(text) == choice


@pytest.mark.parametrize("text", ["", "slowest", "slow:0", "slow:9999", "5,,7", "9-5", "-1", "1e3", "9" * 25])
def test_a_choice_that_is_none_says_what_is_expected(text: str) -> None:
    """Wrong text is a ValueError with the forms, or with the bound."""
    with pytest.raises(ValueError, match=r"expected|at once"):
        parse_steps(text)
