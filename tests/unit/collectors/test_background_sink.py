"""A sink in a thread of its own: order, bounds, failures, the end; the test holds the thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from moetrace_collectors.events import CollectorEvent, EventKind
from moetrace_collectors.joiner import size_bytes
from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_collectors.sinks.background import MAX_EVENTS, BackgroundSink
from moetrace_collectors.sinks.base import StepResult, Writer
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict.no_verdict import no_verdict
from moetrace_schemas.enums import ClosedBy

RUN = SyntheticRun(run_id="r", world_size=2, num_layers=1)
BATCH_BYTES = 10_000
DEADLINE_S = 30.0


class Store:
    """The sink within: writes what it was given once the test lets it."""

    name = "store"

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.abandoned: list[str] = []
        self._given: list[str] = []
        self.may_write = threading.Semaphore(0)
        self.began = threading.Semaphore(0)
        self.works = True
        self.fails = False

    def take_step(self, result: StepResult) -> None:
        """It is given in two parts."""
        raise AssertionError("no whole steps here")

    def take_joined(self, rank_step: RankStep) -> None:
        """Keep."""
        self._given.append(f"joined {rank_step.step}")

    def take_verdict(self, result: StepResult) -> None:
        """Keep."""
        self._given.append(f"verdict {result.joined.step}")

    def take_unjoined(self, rank_step: RankStep) -> None:
        """Keep."""
        self._given.append(f"unjoined {rank_step.step}")

    def take_late(self, rank_step: RankStep) -> None:
        """Keep."""
        self._given.append(f"late {rank_step.step}")

    def take_event(self, event: CollectorEvent) -> None:
        """Keep."""
        self._given.append(event.detail)

    def flush(self) -> None:
        """Write, once the test says so."""
        self.began.release()
        assert self.may_write.acquire(timeout=DEADLINE_S)
        if self.fails:
            raise ZeroDivisionError
        self.batches.append(self._given)
        self._given = []

    def abandon(self) -> None:
        """Remember."""
        self.abandoned += self._given

    def write(self, sink: Writer) -> bool:
        """As the worker writes."""
        sink.flush()
        return self.works


class Clock:
    """Time that the test moves."""

    now_ns = 0

    def __call__(self) -> int:
        """Now."""
        return self.now_ns


@pytest.fixture
def store() -> Store:
    """Where rows go."""
    return Store()


@pytest.fixture
def clock() -> Clock:
    """Monotonic time."""
    return Clock()


@pytest.fixture
def sink(store: Store, clock: Clock) -> Iterator[BackgroundSink]:
    """The sink under test, ended afterwards."""
    sink = BackgroundSink([store], batch_bytes=BATCH_BYTES, batch_interval_ns=1_000, clock_ns=clock)
    sink.start(store.write)
    yield sink
    for _ in range(10):
        store.may_write.release()
    sink.end()


def rank_step(step: int) -> RankStep:
    """One rank step."""
    return RUN.step(step)[0]


def event(detail: str) -> CollectorEvent:
    """One event."""
    return CollectorEvent(
        time_unix_ms=0, kind=EventKind.LATE, reason="", run_id="r", step=None, rank=None, detail=detail
    )


def result(step: int) -> StepResult:
    """A judged step of two ranks."""
    joined = JoinedStep(
        run_id="r",
        step=step,
        world_size=2,
        rank_steps=RUN.step(step),
        missing_ranks=(),
        closed_by=ClosedBy.COMPLETE,
    )
    return StepResult(joined=joined, verdict=no_verdict(joined, ""), loads=())


def await_batches(store: Store, number: int) -> None:
    """Return once a store has written so many."""
    for _ in range(int(DEADLINE_S * 100)):
        if len(store.batches) >= number:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{len(store.batches)} of {number} were written")


def await_written(sink: BackgroundSink, number: int) -> None:
    """Return once so many records are written."""
    for _ in range(int(DEADLINE_S * 100)):
        if sink.num_written >= number:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{sink.num_written} of {number} were written")


def test_records_arrive_in_the_order_they_were_given(sink: BackgroundSink, store: Store) -> None:
    """Of each batch the rows first, then what was found out; nothing is written before the thread has it."""
    sink.take_unjoined(rank_step(1))
    sink.take_event(event("first"))
    assert (sink.num_taken, sink.num_written) == (2, 0)
    sink.flush()
    assert store.began.acquire(timeout=DEADLINE_S)
    sink.take_late(rank_step(2))
    sink.take_event(event("second"))
    for _ in range(2):
        store.may_write.release()
    await_written(sink, 2)
    assert sink.num_taken == 4
    sink.flush()
    for _ in range(2):
        store.may_write.release()
    await_written(sink, 4)
    assert store.batches == [["unjoined 1"], ["first"], ["late 2"], ["second"]]


def test_only_a_full_batch_is_due_while_another_is_written(
    sink: BackgroundSink, store: Store, clock: Clock
) -> None:
    """What is merely old waits for the thread; what is full makes the worker wait."""
    sink.take_event(event("first"))
    assert not sink.is_due(clock.now_ns)
    clock.now_ns += 1_000
    assert sink.is_due(clock.now_ns)
    sink.flush()
    assert store.began.acquire(timeout=DEADLINE_S)
    sink.take_event(event("second"))
    clock.now_ns += 1_000
    assert not sink.is_due(clock.now_ns)
    step, number = rank_step(1), 0
    while number * size_bytes(step) < BATCH_BYTES:
        sink.take_unjoined(step)
        number += 1
    assert sink.is_due(clock.now_ns)
    waiter = threading.Thread(target=sink.flush)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive(), "a third batch would be in memory"
    store.may_write.release()
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive()
    for _ in range(2):
        store.may_write.release()
    await_written(sink, sink.num_taken)
    assert [len(batch) for batch in store.batches] == [1, number, 1]


def test_many_events_make_a_batch(store: Store, clock: Clock) -> None:
    """Each becomes a row, so their number bounds a batch whatever their size; the next begins at nothing."""
    sink = BackgroundSink([store], batch_bytes=10**9, batch_interval_ns=1_000, clock_ns=clock)
    sink.start(store.write)
    store.may_write.release()
    for number in range(MAX_EVENTS):
        assert not sink.is_due(clock.now_ns)
        sink.take_event(event(f"{number % 2}"))
    assert sink.is_due(clock.now_ns)
    sink.flush()
    sink.take_event(event("one"))
    assert not sink.is_due(clock.now_ns)
    sink.end()
    assert [len(batch) for batch in store.batches] == [MAX_EVENTS]


def test_finish_writes_everything(sink: BackgroundSink, store: Store) -> None:
    """The batch in the thread and the buffer."""
    sink.take_event(event("first"))
    sink.flush()
    sink.take_event(event("second"))
    store.may_write.release()
    store.may_write.release()
    assert sink.finish()
    assert store.batches == [["first"], ["second"]]
    assert not sink.is_alive()


def test_what_is_given_up_is_not_counted_as_written(sink: BackgroundSink, store: Store) -> None:
    """A store that stays away until the stop is out of time: the log, or `abandon`, accounts for the rest."""
    store.works = False
    sink.take_event(event("first"))
    sink.flush()
    store.may_write.release()
    sink.take_event(event("second"))
    assert not sink.finish()
    assert sink.num_written == 0
    sink.abandon()
    assert store.abandoned == ["second"], "the first left with the failed write of this fake"


def test_a_fault_in_the_thread_reaches_the_worker(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would otherwise buffer for ever and say that it is well."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def fail(_: Writer) -> bool:
        raise ZeroDivisionError

    sink = BackgroundSink([store], batch_bytes=BATCH_BYTES, batch_interval_ns=1_000, clock_ns=clock)
    sink.start(fail)
    sink.take_event(event("first"))
    sink.flush()
    sink.take_event(event("second"))
    with pytest.raises(RuntimeError, match="store has ended"):
        sink.flush()
    assert not sink.is_alive()


class Two:
    """A sink over two stores, or more."""

    def __init__(self, clock: Clock, *, num_stores: int = 2) -> None:
        self.stores = tuple(Store() for _ in range(num_stores))
        self.sink = BackgroundSink(
            self.stores, batch_bytes=BATCH_BYTES, batch_interval_ns=1_000, clock_ns=clock
        )

    def write(self, sink: Writer) -> bool:
        """As the worker writes."""
        sink.flush()
        return next(store for store in self.stores if store is sink).works

    def batch(self, step: int) -> Store:
        """Hand a batch of one step over; the store that began to write it."""
        self.sink.take_step(result(step))
        self.sink.flush()
        return self._beginning()

    def _beginning(self) -> Store:
        for _ in range(int(DEADLINE_S * 100)):
            for store in self.stores:
                if store.began.acquire(blocking=False):
                    return store
            threading.Event().wait(0.01)
        raise AssertionError("no store began to write")


@pytest.fixture
def two(clock: Clock) -> Iterator[Two]:
    """Two threads that write, ended afterwards."""
    two = Two(clock)
    two.sink.start(two.write)
    yield two
    for store in two.stores:
        for _ in range(10):
            store.may_write.release()
    two.sink.end()


def test_two_batches_are_written_at_once(two: Two) -> None:
    """One store alone would leave half of two cores idle."""
    first, second = two.batch(1), two.batch(2)
    assert first is not second
    for store in (first, second):
        for _ in range(2):
            store.may_write.release()
    await_written(two.sink, 2)
    assert (len(first.batches), len(second.batches)) == (2, 2)


def test_verdicts_wait_for_the_batches_before(two: Two) -> None:
    """A reader who has seen step 2 does not look for step 1 again; the log keeps both until both are in."""
    first, second = two.batch(1), two.batch(2)
    second.may_write.release()
    await_batches(second, 1)
    second.may_write.release()
    assert not second.began.acquire(timeout=0.2), "verdict 2 before rows and verdict of step 1"
    assert two.sink.num_written == 0
    first.may_write.release()
    assert first.began.acquire(timeout=DEADLINE_S)
    assert not second.began.acquire(timeout=0.2), "verdict 2 before verdict 1"
    first.may_write.release()
    await_written(two.sink, 2)
    ranks = [f"joined {step}" for step in (1, 1, 2, 2)]
    assert (first.batches, second.batches) == ([ranks[:2], ["verdict 1"]], [ranks[2:], ["verdict 2"]])


def test_one_thread_that_gives_up_ends_all_and_nothing_is_forgotten(two: Two) -> None:
    """What the other wrote behind it does not count, and its verdicts do not stand without the rows before
    them; what nobody began is given up with the rest.
    """
    first, second = two.batch(1), two.batch(2)
    second.may_write.release()
    await_batches(second, 1)
    first.works = False
    first.may_write.release()
    two.sink.take_event(event("third"))
    second.may_write.release()
    assert not two.sink.finish()
    assert two.sink.num_written == 0
    assert not two.sink.is_alive()
    assert second.batches[1:] == [], "verdict 2 without the rows of step 1"
    two.sink.abandon()
    assert sorted([*first.abandoned, *second.abandoned]) == ["third", "verdict 1", "verdict 2"]


def test_a_thread_that_failed_is_not_waited_for(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch will never be written, nor what was found behind it; the log has both."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    first, second = two.batch(1), two.batch(2)
    first.fails = True
    first.may_write.release()
    for _ in range(2):
        second.may_write.release()
    with pytest.raises(RuntimeError, match="store has ended"):
        two.batch(3)
    two.sink.end()
    assert second.batches == [["joined 2", "joined 2"]]
    assert two.sink.num_written == 0


def test_at_the_end_verdicts_still_wait_for_the_batch_before(clock: Clock) -> None:
    """A third thread that ends because nothing is left for it is no reason to write them too early."""
    two = Two(clock, num_stores=3)
    two.sink.start(two.write)
    first, second = two.batch(1), two.batch(2)
    ending = threading.Thread(target=two.sink.end, daemon=True)
    ending.start()
    for _ in range(int(DEADLINE_S * 100)):
        if not two.sink.is_alive():
            break
        threading.Event().wait(0.01)
    assert not two.sink.is_alive(), "the idle thread has ended"
    second.may_write.release()
    await_batches(second, 1)
    assert not second.began.acquire(timeout=0.2), "verdict 2 before rows and verdict of step 1"
    for store in (first, first, second):
        store.may_write.release()
    ending.join(DEADLINE_S)
    assert not ending.is_alive()
    assert two.sink.num_written == two.sink.num_taken
    assert (first.batches[1:], second.batches[1:]) == ([["verdict 1"]], [["verdict 2"]])
