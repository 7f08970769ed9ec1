"""The worker thread's body, with a fake clock and fake stages: nothing acknowledged is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from moetrace_collectors.dead_letter import DeadLetter
from moetrace_collectors.errors import SinkError
from moetrace_collectors.events import CollectorEvent, EventKind, Rejection
from moetrace_collectors.intake import Intake
from moetrace_collectors.joiner import Joiner, JoinWindow
from moetrace_collectors.model import JoinedStep, RankStep, StepVerdict
from moetrace_collectors.self_metrics import SelfMetrics
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks.base import RetryPolicy, StepResult
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_collectors.verdict.no_verdict import TWO_JOBS
from moetrace_collectors.worker import Clocks, Worker
from moetrace_schemas.enums import ClosedBy, Evidence, RejectReason

RUN = SyntheticRun(run_id="r", world_size=2, num_layers=1)
SECOND = 1_000_000_000
HOUR = 3_600 * SECOND


@dataclass
class FakeClock:
    """Time that only sleeping moves."""

    now_ns: int = 0

    def monotonic_ns(self) -> int:
        """Now."""
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        """Move on."""
        self.now_ns += int(seconds * SECOND)


@dataclass
class FakeSink:
    """Keeps what it is given; fails as often as told."""

    name: str = "fake"
    failures: int = 0
    results: list[StepResult] = field(default_factory=list)
    late: list[RankStep] = field(default_factory=list)
    unjoined: list[RankStep] = field(default_factory=list)
    events: list[CollectorEvent] = field(default_factory=list)
    flushes: int = 0
    abandoned: bool = False
    num_waiting_steps: int = 0
    num_taken: int = 1
    num_written: int = 0

    def take_step(self, result: StepResult) -> None:
        """Keep."""
        self.results.append(result)

    def take_unjoined(self, rank_step: RankStep) -> None:
        """Keep."""
        self.unjoined.append(rank_step)

    def take_late(self, rank_step: RankStep) -> None:
        """Keep."""
        self.late.append(rank_step)

    def take_event(self, event: CollectorEvent) -> None:
        """Keep."""
        self.events.append(event)

    def is_due(self, now_ns: int) -> bool:
        """Never; the end flushes."""
        return False

    def flush(self) -> None:
        """Fail or count."""
        if self.failures:
            self.failures -= 1
            raise SinkError("away", retryable=True)
        self.flushes += 1

    def abandon(self) -> None:
        """Remember."""
        self.abandoned = True


class BrokenJudge:
    """A verdict engine with a fault."""

    def judge(self, joined: JoinedStep) -> StepVerdict:
        """Raise."""
        raise ZeroDivisionError


@dataclass
class Rig:
    """A worker and everything around it."""

    worker: Worker
    intake: Intake
    sink: FakeSink
    clock: FakeClock
    runs: list[tuple[str, ...]]
    dead_letter: Path
    letter: DeadLetter
    joiner: Joiner

    def run(self) -> None:
        """Take everything that is queued, then stop: the body runs in this thread."""
        self.worker.stop()
        self.worker.run()
        self.letter.close()


def rig(
    tmp_path: Path, *, sink: FakeSink | None = None, judge: object = None, shutdown_timeout_s: float = 30
) -> Rig:
    """Wire a worker to fakes."""
    clock, sink = FakeClock(), sink or FakeSink()
    intake = Intake(max_requests=100, max_bytes=10**9, clock_ns=clock.monotonic_ns)
    runs: list[tuple[str, ...]] = []

    def note(run_ids: Sequence[str]) -> None:
        runs.append(tuple(run_ids))

    path = tmp_path / "dead_letter.jsonl"
    letter = DeadLetter(path, max_bytes=10_000)
    joiner = Joiner(JoinWindow(timeout_ns=10 * SECOND, max_steps=10, max_bytes=2**30, max_closed_steps=10))
    worker = Worker(
        intake=intake,
        joiner=joiner,
        judge=judge or VerdictEngine(),  # type: ignore[arg-type]
        layer_loads=lambda joined: (),
        sinks=(sink,),
        dead_letter=letter,
        metrics=SelfMetrics(SeriesBook()),
        clocks=Clocks(monotonic_ns=clock.monotonic_ns, unix_ns=lambda: 5_000_000, sleep=clock.sleep),
        retry=RetryPolicy(),
        shutdown_timeout_s=shutdown_timeout_s,
        on_runs=note,
    )
    return Rig(worker, intake, sink, clock, runs, path, letter, joiner)


def kinds(sink: FakeSink) -> list[EventKind]:
    """Kinds of the events a sink got."""
    return [event.kind for event in sink.events]


def test_stopping_joins_and_writes_what_was_acknowledged(tmp_path: Path) -> None:
    """A complete step and half of one are both judged and flushed at shutdown; nothing stays pending."""
    parts = rig(tmp_path)
    parts.intake.offer(RUN.step(0), (), size_bytes=1)
    parts.intake.offer(RUN.step(1)[:1], (), size_bytes=1)
    parts.run()
    assert [(result.joined.step, result.joined.closed_by) for result in parts.sink.results] == [
        (0, ClosedBy.COMPLETE),
        (1, ClosedBy.SHUTDOWN),
    ]
    assert parts.sink.flushes == 1
    ledger = parts.intake.snapshot()
    assert (ledger.received, ledger.joined, ledger.pending) == (3, 3, 0)
    assert kinds(parts.sink) == [EventKind.STARTED, EventKind.PARTIAL, EventKind.STOPPED]
    assert parts.sink.events[1].detail == "missing ranks: 1"
    assert parts.runs == [("r",)]


def test_a_store_that_hangs_does_not_hold_up_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that neither works nor fails is left alone at the deadline, and the stop says so."""
    monkeypatch.setattr("moetrace_collectors.worker.STUCK_S", 0.0)
    hanging, let_go = threading.Event(), threading.Event()

    class Hanging(FakeSink):
        def flush(self) -> None:
            hanging.set()
            assert let_go.wait(30)
            super().flush()

    parts = rig(tmp_path, sink=Hanging(), shutdown_timeout_s=0.05)
    parts.intake.offer(RUN.step(0), (), size_bytes=1)
    parts.worker.start()
    parts.worker.stop()
    assert hanging.wait(30)
    assert parts.worker.is_stuck
    let_go.set()
    for _ in range(3_000):
        if not parts.worker.is_stuck:
            break
        threading.Event().wait(0.01)
    assert not parts.worker.is_stuck
    assert parts.sink.flushes == 1
    parts.letter.close()


def test_a_backlog_does_not_make_ranks_late(tmp_path: Path) -> None:
    """Ranks that wait in the queue while time passes are joined: time in the window is arrival time."""
    parts = rig(tmp_path)
    parts.intake.offer(RUN.step(0)[:1], (), size_bytes=1)
    parts.clock.now_ns = 9 * SECOND
    parts.intake.offer(RUN.step(0)[1:], (), size_bytes=1)
    parts.clock.now_ns = 1_000 * SECOND
    parts.run()
    assert [result.joined.closed_by for result in parts.sink.results] == [ClosedBy.COMPLETE]


def test_a_step_times_out_against_the_next_arrival(tmp_path: Path) -> None:
    """An arrival later than the window closes the step; the rank that comes then is late and stored."""
    parts = rig(tmp_path)
    parts.intake.offer(RUN.step(0)[:1], (), size_bytes=1)
    parts.clock.now_ns = 10 * SECOND
    parts.intake.offer(RUN.step(0)[1:], (), size_bytes=1)
    parts.run()
    assert [result.joined.closed_by for result in parts.sink.results] == [ClosedBy.TIMEOUT]
    assert [step.rank for step in parts.sink.late] == [1]
    assert EventKind.LATE in kinds(parts.sink)


def test_rejections_reach_dead_letter_and_store(tmp_path: Path) -> None:
    """What the decoder turned away, and what the joiner does, is on file with its reason."""
    parts = rig(tmp_path)
    rejection = Rejection(reason=RejectReason.MALFORMED_COLUMNS, detail="short", run_id="r", step=1, rank=0)
    first, second = RUN.step(0)
    parts.intake.offer((first, replace(second, world_size=5)), (rejection,), size_bytes=1)
    parts.run()
    assert [
        (event.reason, event.rank) for event in parts.sink.events if event.kind is EventKind.REJECTED
    ] == [
        ("malformed_columns", 0),
        ("identity_mismatch", 1),
    ]
    assert len(parts.dead_letter.read_text().splitlines()) == 2
    assert parts.intake.snapshot().rejected == {
        RejectReason.MALFORMED_COLUMNS: 1,
        RejectReason.IDENTITY_MISMATCH: 1,
    }


def test_a_fault_in_the_verdict_stage_costs_the_verdict_and_not_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When judging raises, the step's rows are kept with insufficient evidence that says why."""
    parts = rig(tmp_path, judge=BrokenJudge())
    parts.intake.offer(RUN.step(0), (), size_bytes=1)
    parts.run()
    verdict = parts.sink.results[0].verdict
    assert (verdict.evidence, verdict.suspect) == (Evidence.INSUFFICIENT, None)
    assert "ZeroDivisionError" in verdict.reason
    assert "no verdict for run r, step 0" in caplog.text


def test_last_writes_are_retried_until_they_work(tmp_path: Path) -> None:
    """A store that is away for a while at shutdown still gets everything."""
    parts = rig(tmp_path, sink=FakeSink(failures=5))
    parts.intake.offer(RUN.step(0), (), size_bytes=1)
    parts.run()
    assert (parts.sink.flushes, parts.sink.abandoned) == (1, False)


def test_last_writes_end_at_the_deadline(tmp_path: Path) -> None:
    """A store that stays away does not keep the collector from stopping; what is left is given up."""
    parts = rig(tmp_path, sink=FakeSink(failures=10**6))
    parts.intake.offer(RUN.step(0), (), size_bytes=1)
    parts.run()
    assert parts.sink.abandoned
    assert parts.clock.now_ns == 30 * SECOND


def test_two_jobs_under_one_run_id_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps executed again and again within a minute: one line and one event name the id."""
    rigged = rig(tmp_path)
    for step in range(6):
        for job in range(2):
            for one in RUN.step(step):
                later = replace(one, start_unix_ns=one.start_unix_ns + step * SECOND + job * SECOND // 3)
                assert rigged.intake.offer((later,), (), size_bytes=1) is not None
    rigged.run()
    told = [event for event in rigged.sink.events if event.reason == "two_jobs"]
    assert [event.kind for event in told] == [EventKind.RUN_ID_REUSED]
    assert "two jobs seem to send under run id r at the same time" in told[0].detail
    assert caplog.text.count("two jobs seem") == 1


def test_nobody_is_named_while_two_jobs_share_a_run_id(tmp_path: Path) -> None:
    """A step that may be of both has no verdict and says why; a minute after one ends, it has."""
    rigged = rig(tmp_path)
    first_ns = RUN.step(0)[0].start_unix_ns
    for step in range(40):
        # The second job is a third of a second behind, and ends with step 29.
        for job in range(2 if step < 30 else 1):
            begun_ns = first_ns + step * SECOND + job * SECOND // 3 + (90 * SECOND if step >= 35 else 0)
            ranks = tuple(replace(one, start_unix_ns=begun_ns) for one in RUN.step(step))
            assert rigged.intake.offer(ranks, (), size_bytes=1) is not None
    rigged.run()
    at = {
        (result.joined.step, result.joined.rank_steps[0].start_unix_ns): result.verdict
        for result in rigged.sink.results
    }
    shared = [verdict for (step, _), verdict in at.items() if 2 <= step < 35]
    assert len(shared) >= 33
    assert {(verdict.evidence, verdict.suspect, verdict.reason) for verdict in shared} == {
        (Evidence.INSUFFICIENT, None, TWO_JOBS)
    }
    alone = [verdict for (step, _), verdict in at.items() if step >= 35]
    assert len(alone) == 5
    assert all(verdict.reason != TWO_JOBS and verdict.step_ns > 0 for verdict in alone)


def test_a_job_started_again_is_not_taken_for_two(tmp_path: Path) -> None:
    """A run id used again and again, each time an hour later, is only a run id used again."""
    rigged = rig(tmp_path)
    for job in range(3):
        for one in RUN.step(0):
            later = replace(one, start_unix_ns=one.start_unix_ns + job * 3_600 * SECOND)
            assert rigged.intake.offer((later,), (), size_bytes=1) is not None
    rigged.run()
    reasons = [event.reason for event in rigged.sink.events if event.kind is EventKind.RUN_ID_REUSED]
    assert reasons == ["executed_again", "executed_again"]


def incident(rigged: Rig, *, num_steps: int = 4) -> None:
    """Two jobs under one id, the second a third of a second behind, each a step a second."""
    for step in range(num_steps):
        for job in range(2):
            offer(rigged, step, step * SECOND + job * SECOND // 3)


def offer(rigged: Rig, step: int, later_ns: int) -> None:
    """All ranks of a step, begun so much later than the first step of all."""
    begun_ns = RUN.step(0)[0].start_unix_ns + later_ns
    ranks = tuple(replace(one, start_unix_ns=begun_ns) for one in RUN.step(step))
    assert rigged.intake.offer(ranks, (), size_bytes=1) is not None


def unnamed(rigged: Rig, after_ns: int) -> list[bool]:
    """Of each step that began so much later: whether it is said to be of two jobs."""
    first_ns = RUN.step(0)[0].start_unix_ns + after_ns
    return [
        result.verdict.reason == TWO_JOBS
        for result in rigged.sink.results
        if result.joined.rank_steps[0].start_unix_ns >= first_ns
    ]


def test_a_job_started_again_after_two_had_its_id_is_judged_at_once(tmp_path: Path) -> None:
    """The incident is over when one has been silent for a minute: no restart pays for it again."""
    rigged = rig(tmp_path)
    incident(rigged)
    for job in (1, 2):
        for step in range(3):
            offer(rigged, step, job * HOUR + step * SECOND)
    rigged.run()
    assert any(unnamed(rigged, 0))
    assert unnamed(rigged, HOUR) == [False] * 6
    assert [event.reason for event in rigged.sink.events].count("two_jobs") == 1


def test_a_second_incident_is_said_again(tmp_path: Path) -> None:
    """Two jobs a day later are news."""
    rigged = rig(tmp_path)
    incident(rigged)
    for step in range(4):
        for job in range(2):
            offer(rigged, step, 24 * HOUR + step * SECOND + job * SECOND // 3)
    rigged.run()
    assert [event.reason for event in rigged.sink.events].count("two_jobs") == 2
    assert any(unnamed(rigged, 24 * HOUR))


def test_a_resend_is_no_sign_of_a_second_job(tmp_path: Path) -> None:
    """The same rows once more, long after one of two jobs has ended, leave the other its verdicts."""
    rigged = rig(tmp_path)
    incident(rigged)
    for step in range(100, 106):
        offer(rigged, step, HOUR + step * SECOND)
        offer(rigged, step, HOUR + step * SECOND)
    rigged.run()
    assert unnamed(rigged, HOUR) == [False] * 6
    assert [event.kind for event in rigged.sink.events].count(EventKind.DUPLICATE) == 12


def test_a_collector_that_starts_again_takes_no_restarted_job_for_two(tmp_path: Path) -> None:
    """What counts is when a run began, and not when a new process first heard of it."""
    first = rig(tmp_path)
    for step in range(3):
        offer(first, step, step * SECOND)
    for step in range(3):
        offer(first, step, HOUR + step * SECOND)
    first.run()
    second = rig(tmp_path)
    second.joiner.remember(first.joiner.all_closed())
    # The second run goes on for an hour, and its job starts again half a minute after the collector did.
    offer(second, 3_600, 2 * HOUR)
    for step in range(3):
        offer(second, step, 2 * HOUR + (30 + step) * SECOND)
    second.run()
    assert {result.joined.run_id for result in second.sink.results} == {"r:2", "r:3"}
    assert unnamed(second, 0) == [False] * 4
    assert "two_jobs" not in [event.reason for event in second.sink.events]
