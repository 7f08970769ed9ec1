"""Requests on their way through log, intake and worker: crashes, a store that is away, a backlog on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors.dead_letter import DeadLetter
from moetrace_collectors.errors import SinkError
from moetrace_collectors.events import CollectorEvent, EventKind
from moetrace_collectors.intake import Intake, LedgerSnapshot
from moetrace_collectors.joiner import Joiner, JoinWindow
from moetrace_collectors.journal import Journal, open_journal
from moetrace_collectors.model import RankStep
from moetrace_collectors.pipeline import restore
from moetrace_collectors.receivers.handler import NotDurableError, OverloadedError, Wire
from moetrace_collectors.request_handler import RequestHandler
from moetrace_collectors.self_metrics import SelfMetrics
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks.base import RetryPolicy, StepResult
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_collectors.wal import Position, WalUnavailableError, WriteAheadLog, recover
from moetrace_collectors.worker import Clocks, Worker
from moetrace_schemas.enums import ClosedBy

RUN = SyntheticRun(run_id="r", world_size=3, num_layers=1, num_experts=2)
SECOND = 1_000_000_000
MIB = 2**20


@dataclass
class Store:
    """What outlives every collector: verdicts by step, and the rank steps whose rows are there."""

    is_away: bool = False
    closed_by: dict[tuple[str, int], list[ClosedBy]] = field(default_factory=dict)
    rank_steps: set[tuple[str, int, int, int]] = field(default_factory=set)
    events: list[EventKind] = field(default_factory=list)


@dataclass
class Sink:
    """Buffers like the real one, and writes everything at a flush."""

    store: Store
    name: str = "fake"
    results: list[StepResult] = field(default_factory=list)
    late: list[RankStep] = field(default_factory=list)
    events: list[CollectorEvent] = field(default_factory=list)
    most_waiting: int = 0
    num_written: int = 0
    is_ending: bool = False

    @property
    def num_waiting_steps(self) -> int:
        """Buffered steps."""
        return len(self.results)

    @property
    def num_taken(self) -> int:
        """Everything so far."""
        return self.num_written + len(self.results) + len(self.late) + len(self.events)

    def take_step(self, result: StepResult) -> None:
        """Buffer."""
        self.results.append(result)
        self.most_waiting = max(self.most_waiting, len(self.results))

    def take_unjoined(self, rank_step: RankStep) -> None:
        """Nothing of interest."""

    def take_late(self, rank_step: RankStep) -> None:
        """Buffer."""
        self.late.append(rank_step)

    def take_event(self, event: CollectorEvent) -> None:
        """Buffer."""
        self.events.append(event)

    def is_due(self, now_ns: int) -> bool:
        """As soon as there is anything."""
        return self.num_taken > self.num_written

    def flush(self) -> None:
        """Write, or fail while the store is away."""
        if self.store.is_away:
            raise SinkError("away", retryable=True)
        for result in self.results:
            key = (result.joined.run_id, result.joined.step)
            self.store.closed_by.setdefault(key, []).append(result.joined.closed_by)
            self.store.rank_steps.update(step.key for step in result.joined.rank_steps)
        self.store.rank_steps.update(step.key for step in self.late)
        self.store.events += [event.kind for event in self.events]
        self.num_written = self.num_taken
        self.results, self.late, self.events = [], [], []

    def abandon(self) -> None:
        """Never with a log."""
        raise AssertionError("rows given up although they are in the log")


@dataclass
class LaggingSink(Sink):
    """As a sink with a thread of its own: a flush hands over, and only the next one finds that written."""

    handed_over: list[Sink] = field(default_factory=list)

    @property
    def num_taken(self) -> int:
        """Everything so far."""
        return super().num_taken + sum(batch.num_taken for batch in self.handed_over)

    def flush(self) -> None:
        """Write the batch before, take this one."""
        if self.store.is_away:
            raise SinkError("away", retryable=True)
        for batch in self.handed_over:
            number = batch.num_taken
            batch.flush()
            self.num_written += number
        self.handed_over = [Sink(self.store, results=self.results, late=self.late, events=self.events)]
        self.results, self.late, self.events = [], [], []
        if self.is_ending and self.handed_over[0].num_taken:
            self.flush()


@dataclass
class Collector:
    """One process's worth of a collector on a directory; a crash is to drop it."""

    handler: RequestHandler
    intake: Intake
    worker: Worker
    journal: Journal
    sink: Sink
    letter: DeadLetter
    clock: list[int]

    def send(self, *rank_steps: RankStep) -> bool:
        """Whether it was acknowledged."""
        try:
            self.handler.take(request(rank_steps))
        except OverloadedError:
            return False
        return True

    def work(self, turns: int) -> None:
        """Let the worker take so many turns."""
        for _ in range(turns):
            self.worker.turn(timeout_s=0)

    def drain(self) -> None:
        """Let the worker take all that waits."""
        while self.ledger().backlog_requests or self.ledger().pending:
            before = self.ledger()
            self.work(1)
            if self.ledger() == before:
                return

    def stop(self) -> None:
        """A clean end."""
        self.sink.is_ending = True
        self.worker.stop()
        self.worker.run()
        self.crash()

    def crash(self) -> None:
        """The end of the process: descriptors go, nothing else happens."""
        self.journal.close()
        self.letter.close()

    def ledger(self) -> LedgerSnapshot:
        """Counts, after checking that they add up."""
        ledger = self.intake.snapshot()
        fates = (
            ledger.joined + ledger.late + ledger.duplicate + sum(ledger.rejected.values()) + ledger.pending
        )
        assert ledger.received == fates
        return ledger


def start(
    directory: Path,
    store: Store,
    *,
    queue_requests: int = 100,
    segment_bytes: int = 4 * MIB,
    max_bytes: int = 64 * MIB,
    max_steps: int = 100,
    waits: list[bool] | None = None,
    sink_type: type[Sink] = Sink,
) -> Collector:
    """A collector on what an earlier one left.

    Args:
        directory: of the log.
        store: where rows go.
        queue_requests: in memory.
        segment_bytes: of the log.
        max_bytes: of the log.
        max_steps: open at once.
        waits: what each wait between attempts of a write does; the store is back where it is used up.
        sink_type: how rows reach the store.
    """
    clock = [0]

    def sleep(seconds: float) -> None:
        clock[0] += int(seconds * SECOND)

    directory.mkdir(exist_ok=True)
    journal = open_journal(
        directory / "wal",
        epoch=1,
        now_ns=0,
        max_bytes=max_bytes,
        segment_bytes=segment_bytes,
        max_world_size=1_000,
        max_decompressed_bytes=64 * MIB,
    )
    intake = Intake(
        max_requests=queue_requests,
        max_bytes=10**9,
        clock_ns=lambda: clock[0],
        num_replayed=journal.recovery.num_requests,
        read_log=journal.read,
    )
    metrics = SelfMetrics(SeriesBook())
    handler = RequestHandler(intake=intake, metrics=metrics, max_world_size=1_000, journal=journal)
    joiner = Joiner(
        JoinWindow(timeout_ns=10 * SECOND, max_steps=max_steps, max_bytes=2**30, max_closed_steps=1_000)
    )
    sink = sink_type(store)
    letter = DeadLetter(directory / "dead_letter.jsonl", max_bytes=10_000)
    worker = Worker(
        intake=intake,
        joiner=joiner,
        judge=VerdictEngine(),
        layer_loads=lambda joined: (),
        sinks=(sink,),
        dead_letter=letter,
        metrics=metrics,
        clocks=Clocks(monotonic_ns=lambda: clock[0], unix_ns=lambda: 5_000_000, sleep=sleep),
        retry=RetryPolicy(),
        shutdown_timeout_s=30,
        on_runs=lambda runs: None,
        log=journal,
    )
    restore(journal, joiner, worker, metrics)
    collector = Collector(handler, intake, worker, journal, sink, letter, clock)
    _OPEN.append(collector)
    return collector


_OPEN: list[Collector] = []


@pytest.fixture(autouse=True)
def _close_all() -> Iterator[None]:
    """Descriptors of collectors that a test left running."""
    yield
    while _OPEN:
        _OPEN.pop().crash()


def keys(*rank_steps: RankStep) -> set[tuple[str, int, int, int]]:
    """Their identities."""
    return {rank_step.key for rank_step in rank_steps}


def test_what_was_acknowledged_and_not_joined_comes_back_after_a_crash(tmp_path: Path) -> None:
    """Two of three ranks arrive, the process dies, the third comes later: the step closes complete."""
    store = Store()
    first = start(tmp_path, store)
    assert first.send(*RUN.step(0)[:2])
    first.work(5)
    first.crash()
    second = start(tmp_path, store)
    second.work(5)
    assert second.send(RUN.step(0)[2])
    second.work(5)
    assert store.closed_by == {("r", 0): [ClosedBy.COMPLETE]}
    assert store.rank_steps == keys(*RUN.step(0))
    assert second.ledger().joined == 3


def test_a_step_that_is_stored_is_not_judged_again_after_a_crash(tmp_path: Path) -> None:
    """Its requests are still in the log: they count as duplicates, without a row for each."""
    store = Store()
    first = start(tmp_path, store)
    first.send(*RUN.step(0))
    first.work(3)
    first.crash()
    second = start(tmp_path, store)
    second.work(3)
    assert store.closed_by == {("r", 0): [ClosedBy.COMPLETE]}
    assert (second.ledger().received, second.ledger().duplicate) == (3, 3)
    assert EventKind.DUPLICATE not in store.events
    assert EventKind.REPLAYED in store.events


def test_a_step_is_stored_only_once_the_sink_that_writes_behind_says_so(tmp_path: Path) -> None:
    """A crash while a batch is on its way: the log still has it."""
    store = Store()
    first = start(tmp_path, store, sink_type=LaggingSink)
    first.send(*RUN.step(0))
    first.work(1)
    assert store.closed_by == {}
    first.crash()
    second = start(tmp_path, store)
    second.work(3)
    assert store.closed_by == {("r", 0): [ClosedBy.COMPLETE]}


def test_a_straggler_after_a_clean_stop_does_not_replace_the_verdict(tmp_path: Path) -> None:
    """The memory of closed steps outlives a stop, though the log is empty then."""
    store = Store()
    first = start(tmp_path, store)
    first.send(*RUN.step(0))
    first.stop()
    assert sum(path.stat().st_size for path in (tmp_path / "wal").iterdir()) < 400
    second = start(tmp_path, store)
    assert second.send(RUN.step(0)[1])
    second.stop()
    assert store.closed_by == {("r", 0): [ClosedBy.COMPLETE]}
    assert second.ledger().duplicate == 1


def test_a_store_that_is_away_for_ten_minutes_loses_nothing_and_costs_no_memory(tmp_path: Path) -> None:
    """600 steps come while the store is away: all are acknowledged, few are in memory, all are stored after.

    The worker hangs in the retry of its first write, as it does in life; senders go on meanwhile.
    """
    store = Store(is_away=True)
    collector = start(tmp_path, store, queue_requests=10)
    sent = 0

    def minute_passes(seconds: float) -> bool:
        nonlocal sent
        collector.clock[0] += int(seconds * SECOND)
        while sent < min(600, collector.clock[0] // SECOND):
            assert collector.send(*RUN.step(sent))
            sent += 1
        store.is_away = collector.clock[0] < 600 * SECOND
        return True

    collector.worker.wait_between_attempts = minute_passes
    assert collector.send(*RUN.step(0))
    sent = 1
    collector.work(1)
    assert collector.clock[0] >= 600 * SECOND
    ledger = collector.ledger()
    assert ledger.received == sent * 3 >= 1_790
    assert ledger.backlog_requests >= sent - 12
    collector.drain()
    assert collector.ledger().pending == 0
    assert store.rank_steps == {key for step in range(sent) for key in keys(*RUN.step(step))}
    assert set(store.closed_by) == {("r", step) for step in range(sent)}
    assert {tuple(closed) for closed in store.closed_by.values()} == {(ClosedBy.COMPLETE,)}
    assert collector.sink.most_waiting <= 2


def test_a_log_that_is_full_tells_senders_to_come_back_and_counts_nothing(tmp_path: Path) -> None:
    """With the store away for longer than the log has room, senders wait; what was taken is kept."""
    store = Store(is_away=True)
    collector = start(tmp_path, store, queue_requests=2, max_bytes=20_000, segment_bytes=5_000)
    taken = [step for step in range(100) if collector.send(*RUN.step(step))]
    assert 2 < len(taken) < 100
    assert taken == list(range(len(taken)))
    assert collector.ledger().received == 3 * len(taken)
    store.is_away = False
    collector.drain()
    assert len(store.closed_by) == len(taken)
    assert collector.send(*RUN.step(100))


def test_the_log_shrinks_as_steps_are_stored(tmp_path: Path) -> None:
    """A segment is gone once its steps are stored; an open step keeps its own segment and all behind it."""
    collector = start(tmp_path, Store(), segment_bytes=8_000)
    for step in range(50):
        collector.send(*RUN.step(step))
        collector.work(1)
    assert collector.journal.num_bytes < 3 * 8_000
    collector.send(RUN.step(50)[0])
    for step in range(51, 101):
        collector.send(*RUN.step(step))
        collector.work(1)
    assert collector.journal.num_bytes > 100_000
    collector.send(*RUN.step(50)[1:])
    collector.work(2)
    collector.send(*RUN.step(101))
    collector.work(1)
    assert collector.journal.num_bytes < 3 * 8_000


def test_a_stop_while_the_store_is_away_leaves_all_in_the_log(tmp_path: Path) -> None:
    """The stop keeps its deadline, says that something is left, and the next start stores it."""
    store = Store(is_away=True)
    first = start(tmp_path, store, queue_requests=2)
    for step in range(20):
        first.send(*RUN.step(step))
    first.stop()
    assert first.worker.is_log_behind
    assert first.clock[0] <= 31 * SECOND
    store.is_away = False
    second = start(tmp_path, store)
    second.stop()
    assert not second.worker.is_log_behind
    assert store.closed_by == {("r", step): [ClosedBy.COMPLETE] for step in range(20)}


def test_a_disk_that_refuses_acknowledges_nothing_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender hears that it was not taken, nothing is counted, and the next request works."""
    store = Store()
    collector = start(tmp_path, store)

    def refuse(*args: object, **kwargs: object) -> None:
        raise WalUnavailableError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(collector.journal, "append", refuse)
        with pytest.raises(NotDurableError) as error:
            collector.handler.take(request(RUN.step(0)))
        assert error.value.retry_after_s == 5
    assert collector.ledger().received == 0
    assert collector.send(*RUN.step(0))
    collector.work(1)
    assert list(store.closed_by) == [("r", 0)]


def test_an_acknowledgement_that_fails_after_the_join_makes_the_resend_a_duplicate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed sync is no acknowledgement; what is sent again is counted again and joined once."""
    store = Store()
    collector = start(tmp_path, store)

    def refuse(position: object) -> None:
        raise WalUnavailableError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(collector.journal, "commit", refuse)
        assert not collector.send(*RUN.step(0))
    assert collector.send(*RUN.step(0))
    collector.work(3)
    assert (collector.ledger().joined, collector.ledger().duplicate) == (3, 3)
    assert store.closed_by == {("r", 0): [ClosedBy.COMPLETE]}


def test_a_backlog_that_the_disk_has_lost_is_counted(tmp_path: Path) -> None:
    """Segments that vanish under a running collector: their rank steps are rejected by name."""
    store = Store(is_away=True)
    collector = start(tmp_path, store, queue_requests=2)
    for step in range(10):
        collector.send(*RUN.step(step))
    (segment,) = (tmp_path / "wal").iterdir()
    data = bytearray(segment.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    segment.write_bytes(data)
    store.is_away = False
    collector.drain()
    rejected = collector.ledger().rejected
    assert {reason.value for reason in rejected} == {"wal_damaged"}
    assert sum(rejected.values()) + collector.ledger().joined == 30


def test_a_note_that_the_disk_did_not_make_durable_is_owed_again(tmp_path: Path) -> None:
    """What it tells of has left the log by then: the next note tells all of it once more."""
    failures: list[OSError] = []

    def sync(fd: int) -> None:
        if failures:
            raise failures.pop()
        os.fdatasync(fd)

    recovery = recover(tmp_path, now_ns=0)
    log = WriteAheadLog(
        tmp_path, epoch=1, next_segment=1, sizes={}, max_bytes=1 << 20, segment_bytes=1_000, sync=sync
    )
    journal = Journal(log, recovery, max_world_size=8, max_decompressed_bytes=1 << 20)
    for number in range(6):
        position = journal.append(Wire(body=b"x" * 400), arrived_ns=number)
        journal.commit(position)
    failures.append(OSError(5, "Input/output error"))
    journal.mark_stored(b"one", before_segment=position.segment, everything=b"all")
    assert log.oldest_segment == position.segment
    assert journal.wants_everything(log.oldest_segment)
    journal.mark_stored(b"two", before_segment=log.oldest_segment, everything=b"all and two")
    assert not journal.wants_everything(log.oldest_segment)
    journal.close()
    assert list(recover(tmp_path, now_ns=0).closed)[-1] == b"all and two"


def test_a_disk_that_the_log_has_filled_is_emptied_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is stored is deleted although nothing can be written; the memory of closed steps follows later.

    The disk refuses as long as three segments lie on it. A line is logged each time it begins to refuse.
    """
    store = Store(is_away=True)
    collector = start(tmp_path, store, queue_requests=2, segment_bytes=3_000)
    log = collector.journal._log
    append = log.append

    def refuse_when_full(*args: Any, **kwargs: Any) -> Position:
        if len(list((tmp_path / "wal").iterdir())) >= 3:
            raise WalUnavailableError("No space left on device")
        return append(*args, **kwargs)

    monkeypatch.setattr(log, "append", refuse_when_full)
    taken = [step for step in range(50) if collector.send(*RUN.step(step))]
    assert 2 < len(taken) < 50
    store.is_away = False
    collector.drain()
    collector.work(3)
    assert len(store.closed_by) == len(taken)
    assert collector.send(*RUN.step(50))
    collector.work(2)
    assert 1 <= len([one for one in caplog.records if "write-ahead log" in one.message]) <= 2 < len(taken)
    collector.crash()
    again = start(tmp_path, store)
    assert again.send(*RUN.step(0))
    again.work(5)
    assert store.closed_by[("r", 0)] == [ClosedBy.COMPLETE]


# --- property: the law with restarts ---------------------------------------------------------------

DEEDS = st.lists(
    st.one_of(
        # Ranks 0 to 2 alone, or all of them at once.
        st.tuples(st.just("send"), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("work"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("crash"), st.just(0), st.just(0)),
        st.tuples(st.just("stop"), st.just(0), st.just(0)),
        st.tuples(st.just("tear"), st.integers(1, 60), st.just(0)),
        st.tuples(st.just("time"), st.integers(1, 12), st.just(0)),
    ),
    max_size=30,
)


@contextmanager
def _directory() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


@settings(max_examples=120, deadline=None)
@given(deeds=DEEDS, queue_requests=st.integers(1, 3), sink_type=st.sampled_from([Sink, LaggingSink]))
def test_restarts_lose_nothing_that_was_acknowledged_and_judge_no_step_twice(
    deeds: list[tuple[str, int, int]], queue_requests: int, sink_type: type[Sink]
) -> None:
    """Sends, resends, crashes, stops, garbage behind the log, time: the law holds at every moment.

    In the end every acknowledged rank step is stored, and no step has a verdict after a complete one. A crash
    between a write in another thread and its mark has the step judged again, to the same end.
    """
    with _directory() as directory:
        store, acknowledged = Store(), set()

        def begin() -> Collector:
            return start(
                directory, store, queue_requests=queue_requests, segment_bytes=3_000, sink_type=sink_type
            )

        collector = begin()
        for deed, number, rank in deeds:
            if deed == "send":
                rank_steps = RUN.step(number)[rank : rank + 1] or RUN.step(number)
                if collector.send(*rank_steps):
                    acknowledged |= keys(*rank_steps)
            elif deed == "work":
                collector.work(number)
            elif deed == "time":
                collector.clock[0] += number * SECOND
            else:
                if deed == "stop":
                    collector.stop()
                else:
                    collector.crash()
                if deed == "tear":
                    # What a power cut leaves behind the last sync.
                    newest = max((directory / "wal").glob("*.wal"), default=None)
                    if newest is not None:
                        with newest.open("ab") as file:
                            file.write(bytes(range(number)))
                collector = begin()
            collector.ledger()
        collector.drain()
        collector.stop()
        assert collector.ledger().pending == 0
        assert acknowledged <= store.rank_steps
        for verdicts in store.closed_by.values():
            assert len(verdicts) == 1 or sink_type is LaggingSink, store.closed_by
            assert len(set(verdicts)) == 1, store.closed_by


def test_a_run_that_is_executed_again_is_stored_apart_even_across_a_restart(tmp_path: Path) -> None:
    """The second run under one id keeps its own name for all its steps, also those the first never had."""
    store = Store()
    first = start(tmp_path, store)
    for step in range(3):
        first.send(*RUN.step(step))
    first.work(5)
    again = replace(RUN, start_unix_ns=RUN.start_unix_ns + 3_600 * SECOND)
    first.send(*again.step(0))
    first.work(2)
    first.crash()
    second = start(tmp_path, store)
    for step in range(1, 5):
        second.send(*again.step(step))
    second.work(10)
    assert store.closed_by == {
        **{("r", step): [ClosedBy.COMPLETE] for step in range(3)},
        **{("r:2", step): [ClosedBy.COMPLETE] for step in range(5)},
    }
    assert store.events.count(EventKind.RUN_ID_REUSED) >= 1
