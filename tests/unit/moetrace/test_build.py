"""A finished buffer becomes a record: marks resolved, traffic summed, rows on the exchanges they belong."""

from __future__ import annotations

from collections import Counter

from moetrace.record.assembler import Assembler
from moetrace.record.buffer import TICKET_SHIFT, StepBuffer
from moetrace.record.build import build_record
from moetrace.record.sites import Role, Site, SiteTable
from moetrace.record.types import PhaseRow, StepRecord
from moetrace.testing import FakeTime
from moetrace.timing.clock import HostClock
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Direction, Phase

from .intervals import EXCHANGE, WAIT, block, experts, lines, phase


class Step:
    """A step that is recorded by hand."""

    def __init__(self, duration: int = 100) -> None:
        self.sites = SiteTable()
        self.buffer = StepBuffer(HostClock(FakeTime().now_ns), 64)
        self.buffer.start_mark, self.buffer.end_mark = 1000, 1000 + duration

    def call(self, site: Site, start: int, end: int, flags: int = 0, ticket: int = 0) -> None:
        """Record one call; times below zero are marks without a stamp."""
        number = self.sites.add(site)
        if start >= 0:
            start, end = start + 1000, end + 1000
        self.buffer.add(number, start, end, int(flags) | ticket << TICKET_SHIFT)

    def record(self) -> StepRecord:
        """The finished record."""
        return build_record(self.buffer, Assembler(self.sites), "host", Counter())


def expert_parallel_pass(step: Step, start: int, flags: int = 0) -> None:
    """Router, permute with count and payload exchange, experts, combine: 50 ns."""
    step.call(phase("router", 0), start, start + 5, flags)
    step.call(EXCHANGE, start + 7, start + 9, flags)
    step.call(EXCHANGE, start + 10, start + 14, flags)
    step.call(phase("permute", 0), start + 5, start + 15, flags)
    step.call(experts(0, "expert_gemm"), start + 15, start + 30, flags)
    step.call(EXCHANGE, start + 32, start + 38, flags)
    step.call(phase("unpermute", 0), start + 30, start + 40, flags)
    step.call(block(0), start, start + 50, flags)


def traffic(step: Step) -> None:
    """What one pass sent and received."""
    step.buffer.traffic.append((0, Phase.DISPATCH, 16, [3, 4]))
    step.buffer.traffic.append((0, Phase.COMBINE, 16, [3, 2]))
    step.buffer.local_rows.append((0, 5))


def with_rows(rows: tuple[PhaseRow, ...]) -> list[tuple[str, str, int, int, int]]:
    """Rows that know how much they moved."""
    return [(r.phase, r.direction, r.ordinal, r.rows, r.bytes) for r in rows if r.rows >= 0 or r.bytes >= 0]


def test_rows_and_bytes_belong_to_the_payload_exchanges_and_the_gemm() -> None:
    """The count exchange moves counts and not rows; the payload is the last of a layer's dispatches."""
    step = Step()
    expert_parallel_pass(step, 10)
    traffic(step)
    assert with_rows(step.record().phases) == [
        ("dispatch", "forward", 1, 7, 112),
        ("expert_gemm", "forward", 0, 5, -1),
        ("combine", "forward", 0, 5, 80),
    ]


def test_recompute_repeats_times_but_not_rows() -> None:
    """With activation checkpointing, rows stay on the forward's exchanges and GEMM."""
    step = Step(200)
    expert_parallel_pass(step, 10)
    traffic(step)
    expert_parallel_pass(step, 110, RowFlag.RECOMPUTE)
    record = step.record()
    assert with_rows(record.phases) == [
        ("dispatch", "forward", 1, 7, 112),
        ("expert_gemm", "forward", 0, 5, -1),
        ("combine", "forward", 0, 5, 80),
    ]
    backward = [row for row in record.phases if row.direction is Direction.BACKWARD]
    assert backward
    assert {(row.rows, row.bytes) for row in backward} == {(-1, -1)}


def test_rows_of_several_forwards_are_those_of_each_pass_and_add_up_by_layer() -> None:
    """Gradient accumulation inside one step: each pass has the rows that were noted in it."""
    step = Step(200)
    expert_parallel_pass(step, 10)
    traffic(step)
    expert_parallel_pass(step, 110)
    step.buffer.traffic.append((0, Phase.DISPATCH, 16, [10, 1]))
    step.buffer.traffic.append((0, Phase.COMBINE, 16, [2, 2]))
    step.buffer.local_rows.append((0, 4))
    record = step.record()
    assert with_rows(record.phases) == [
        ("dispatch", "forward", 1, 7, 112),
        ("expert_gemm", "forward", 0, 5, -1),
        ("combine", "forward", 0, 5, 80),
        ("dispatch", "forward", 3, 11, 176),
        ("expert_gemm", "forward", 1, 4, -1),
        ("combine", "forward", 1, 4, 64),
    ]
    assert [(item.phase, item.rows) for item in record.traffic] == [
        ("dispatch", (13, 5)),
        ("combine", (5, 4)),
    ]


def test_rows_stay_unknown_where_not_every_forward_was_noted() -> None:
    """Which of two passes the one note is of cannot be told; how much the step moved is known."""
    step = Step(200)
    for start in (10, 110):
        expert_parallel_pass(step, start)
    traffic(step)
    record = step.record()
    assert with_rows(record.phases) == []
    assert [(item.phase, item.rows) for item in record.traffic] == [("dispatch", (3, 4)), ("combine", (3, 2))]


def test_what_is_sent_behind_the_payload_does_not_get_its_rows() -> None:
    """Where a framework is known to send weights behind the rows, as Megatron-Core does."""
    step = Step()
    expert_parallel_pass(step, 10)
    traffic(step)
    step.buffer.behind_payload[0, Phase.DISPATCH] = 1
    assert with_rows(step.record().phases) == [
        ("dispatch", "forward", 0, 7, 112),
        ("expert_gemm", "forward", 0, 5, -1),
        ("combine", "forward", 0, 5, 80),
    ]


def test_rows_of_exchanges_without_a_router_beside_them_are_told_apart_by_pass() -> None:
    """Hand-written code may wrap its exchanges alone: the rows of two are not those of the last one."""
    step = Step(200)
    for start in (10, 110):
        step.call(EXCHANGE, start + 7, start + 9)
        step.call(phase("dispatch", 0), start + 5, start + 15)
        step.call(experts(0, "expert_gemm"), start + 15, start + 30)
        traffic(step)
    record = step.record()
    assert with_rows(record.phases) == []
    assert [(item.phase, item.rows) for item in record.traffic] == [("dispatch", (6, 8)), ("combine", (6, 4))]


def test_launch_and_wait_find_each_other_by_ticket() -> None:
    """The ticket rides above the row flags, and shows in no row."""
    step = Step()
    step.call(EXCHANGE, 20, 22, RowFlag.ASYNC, ticket=7)
    step.call(WAIT, 30, 60, ticket=7)
    step.call(phase("dispatch", 0), 10, 80)
    assert lines(step.record().phases)[2] == "0 dispatch 20-60 barrier async"


def test_a_call_without_a_stamp_is_left_out_and_not_called_seen() -> None:
    """Missing data looks missing: a captured call is neither timed nor covered."""
    step = Step()
    step.call(phase("router", 0), 10, 20)
    step.call(phase("permute", 0), -1, -1)
    step.call(phase("unpermute", 0), -1, 30)
    record = step.record()
    assert lines(record.phases) == ["0 outside 0-10", "0 router 10-20", "-1 outside 20-100"]
    assert record.seen_sites == {0}


def test_a_record_says_what_its_step_was() -> None:
    """Everything that was said when the step began is in the record."""
    step = Step()
    buffer = step.buffer
    buffer.begin(
        5, microbatch=2, cohort="code", warmup=True, placement_version=9, start_unix_ns=1_700_000_000_000
    )
    buffer.start_mark, buffer.end_mark = 10, 60
    record = step.record()
    assert (record.step, record.microbatch, record.cohort, record.warmup) == (5, 2, "code", True)
    assert (record.placement_version, record.start_unix_ns, record.duration_ns) == (9, 1_700_000_000_000, 50)
    assert record.clock == "host"
    assert record.experts == ()


def test_a_phase_of_its_own_kind_of_site_is_counted_as_seen() -> None:
    """Coverage is by call site: the numbers of the sites that fired."""
    step = Step()
    step.call(Site(Role.PHASE, Phase.ROUTER, 0), 10, 20)
    step.call(Site(Role.PHASE, Phase.ROUTER, 0), 30, 40)
    assert step.record().seen_sites == {0, 1}
