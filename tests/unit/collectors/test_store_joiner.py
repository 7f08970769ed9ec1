"""`moetrace join` outlives a store that is away: it looks back to its last turn and judges no step twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from clickhouse_connect.driver.exceptions import DatabaseError, OperationalError

from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger import ledger_rows
from moetrace_collectors.model import JoinedStep, StepVerdict
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks import placement_ledger
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.store_clock import HOUR_MS, NOW
from moetrace_collectors.store_join import queries, store_joiner
from moetrace_collectors.store_join.closed_steps import ClosedStep, joined_step
from moetrace_collectors.store_join.join_ledger import JoinLedger
from moetrace_collectors.store_join.step_finder import RECENT_MS
from moetrace_collectors.store_join.store_joiner import (
    STEPS_AT_ONCE,
    JoinSettings,
    StoreJoiner,
)
from moetrace_collectors.store_join.turns import join_until
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_schemas.enums import ClosedBy
from query_answer import Answer

MAX_FIELD_BYTES = 131_072
"""ClickHouse's http_max_field_value_size, which nobody raises."""
RECORD = {
    "run_id": "r", "step": 7, "rank": 0, "microbatch": 0, "world_size": 1, "ep_group": 0, "ep_rank": 0,
    "ep_size": 1, "forward_mode": "train", "cohort": "", "model_name": "", "model_version": "",
    "host_name": "", "clock": "host", "sample_period": 1, "placement_version": 0, "warmup": 0,
    "anchor_error_ns": -1, "tracer_ns": -1, "expected_sites": 0, "seen_sites": 0,
    "start_unix_ns": 10**18, "duration_ns": 5,
}  # fmt: skip
STRANGE = {"forward_mode": "a mode of a later version"}


@dataclass
class FakeStore:
    """Whole steps of one rank; takes inserts unless told to fail, and parameters that a server takes."""

    now_ms: int = 100 * HOUR_MS
    steps: Sequence[int] = (7,)
    strange: frozenset[int] = frozenset()
    """Steps with a row that no collector writes."""
    expired: frozenset[int] = frozenset()
    """Steps whose rows have gone since they were counted."""
    judged: set[int] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    """Tables whose next insert fails."""
    refused: dict[str, Exception] = field(default_factory=dict)
    """Tables that take no row, and why."""
    unreadable: list[Exception] = field(default_factory=list)
    """What the next readings of rank steps raise."""
    is_away: bool = False
    mappings: Sequence[dict[str, Any]] = ()
    """Rows of the ledger that tell a placement."""
    inserted: list[str] = field(default_factory=list)
    since_ms: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)

    def query(self, query: str, *, parameters: dict[str, Any] | None = None) -> Answer:
        """Answer what the joiner asks."""
        if self.is_away:
            raise OperationalError("no route to host")
        for name, value in (parameters or {}).items():
            if len(str(value)) > MAX_FIELD_BYTES:
                raise DatabaseError(f"Code: 1000. Field {name} is too long", code=1000)
        if query == NOW:
            return Answer([{"now": self.now_ms}])
        assert parameters is not None
        if query == queries.ARRIVED:
            self.since_ms.append(parameters["since_ms"])
            arrived = {"run_id": "r", "arrivals": 1, "first_ms": 1, "last_ms": 1}
            return Answer([{**arrived, "step": number} for number in self.steps])
        if query in (queries.WRITTEN, queries.WAITING):
            return Answer([])
        if "placement_ledger" in query:
            return Answer(list(self.mappings) if query == ledger_rows.OF_VERSION else [])
        asked = parameters["steps"]
        if query == queries.STEPS:
            step = {"records": 1, "world_size": 1, "world_sizes": 1, "num_microbatches": 1}
            return Answer([{**step, "step": number} for number in asked])
        if query == queries.JUDGED:
            return Answer([{"run_id": "r", "step": number} for number in asked if number in self.judged])
        if query != queries.RANK_STEPS:
            return Answer([])
        if self.unreadable:
            raise self.unreadable.pop(0)
        self.read += asked
        there = [number for number in asked if number not in self.expired]
        version = {"placement_version": 3} if self.mappings else {}
        return Answer(
            [{**RECORD, **version, "step": one, **(STRANGE if one in self.strange else {})} for one in there]
        )

    def insert(self, table: str, data: Any, **options: Any) -> None:
        """Take rows, or fail."""
        if table in self.refused:
            raise self.refused[table]
        if table in self.failures:
            self.failures.remove(table)
            raise OperationalError("no space left")
        self.inserted.append(table)


def joiner(store: FakeStore, judged: list[int]) -> StoreJoiner:
    """A joiner that tells which steps it has written."""

    def written(results: Sequence[StepResult]) -> None:
        judged.extend(result.joined.step for result in results)

    return StoreJoiner(store, JoinSettings(database="d", timeout_s=1.0), on_written=written)


def test_rows_that_are_not_taken_are_written_by_the_next_turn() -> None:
    """The step is judged once, told of once, and its verdict goes in when the store takes it."""
    store, judged = FakeStore(failures=["step_verdicts"]), []
    joining = joiner(store, judged)
    with pytest.raises(UsageError, match="no space left"):
        joining.turn()
    assert (judged, "step_verdicts" in store.inserted) == ([], False)
    assert joining.turn() == 1
    assert joining.turn() == 0
    assert (judged, store.inserted.count("step_verdicts")) == ([7], 1)


def test_it_looks_back_to_its_last_turn() -> None:
    """After an hour without the store, rows of that hour are looked at, and a bit more."""
    store = FakeStore()
    joining = joiner(store, [])
    joining.turn()
    store.now_ms += 1_000
    joining.turn()
    last_ms = store.now_ms
    store.is_away = True
    with pytest.raises(UsageError, match="no route to host"):
        joining.turn()
    store.is_away, store.now_ms = False, store.now_ms + HOUR_MS
    joining.turn()
    margin_ms = RECENT_MS + 2_000
    assert store.since_ms == [76 * HOUR_MS, last_ms - 1_000 - margin_ms, last_ms - margin_ms]


def test_a_store_that_is_away_is_asked_again_after_longer_waits() -> None:
    """Each failure doubles the wait, up to half a minute; the first answer ends that."""
    store = FakeStore(is_away=True)
    waits: list[float] = []
    said: list[str] = []
    turns: list[int] = []

    def stopped(seconds: float) -> bool:
        waits.append(seconds)
        store.is_away = len(waits) < 7
        return len(waits) == 9

    on_failed: Callable[[UsageError], None] = lambda error: said.append(str(error))  # noqa: E731
    join_until(joiner(store, []), stopped=stopped, interval_s=1.0, on_turn=turns.append, on_failed=on_failed)
    assert waits == [2, 4, 8, 16, 30, 30, 30, 1, 1]
    assert (turns, len(said)) == ([1, 0], 7)


def test_a_long_look_back_is_asked_for_in_pieces() -> None:
    """A server takes 128 KiB in one parameter: so many steps are named in several queries."""
    numbers = range(10**15, 10**15 + 10_000)
    store = FakeStore(steps=numbers, judged=set(numbers[:-3]))
    assert joiner(store, []).turn() == 3
    assert store.inserted.count("step_verdicts") == 1


def test_rows_refused_for_good_are_given_up_and_told() -> None:
    """A table that refuses its rows does not hold up the others, nor the steps behind."""
    error = DatabaseError("Code: 117. no such type\nand more", code=117)
    store = FakeStore(steps=range(2 * STEPS_AT_ONCE), refused={"step_verdicts": error})
    lost: list[tuple[str, int, str]] = []
    joining = StoreJoiner(
        store, JoinSettings(database="d"), on_lost=lambda table, rows, why: lost.append((table, rows, why))
    )
    assert joining.turn() == 2 * STEPS_AT_ONCE
    assert joining.turn() == 0
    assert lost == [("step_verdicts", STEPS_AT_ONCE, "Code: 117. no such type")] * 2


def test_a_step_whose_rows_have_gone_is_passed_over() -> None:
    """Rows expire between two queries; the other steps are judged."""
    judged: list[int] = []
    assert joiner(FakeStore(steps=(6, 7, 8), expired=frozenset({7})), judged).turn() == 2
    assert judged == [6, 8]


def test_a_step_that_does_not_read_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It is told as lost, once, and passed over; the others of its batch are judged."""
    store, judged, lost = FakeStore(steps=(6, 7, 8), strange=frozenset({7})), [], []
    joining = StoreJoiner(
        store,
        JoinSettings(database="d"),
        on_written=lambda results: judged.extend(result.joined.step for result in results),
        on_lost=lambda *what: lost.append(what),
    )
    assert (joining.turn(), joining.turn()) == (2, 0)
    assert judged == [6, 8]
    [(table, number, reason)] = lost
    assert (table, number) == ("rank_steps", 1)
    assert reason.startswith("run r, step 7: ValueError: 'a mode of a later version'")


def test_a_step_that_cannot_be_judged_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its verdict says that there is none, and why."""
    results: list[StepResult] = []
    judge = VerdictEngine.judge

    def fails(engine: VerdictEngine, joined: JoinedStep) -> StepVerdict:
        if joined.step == 7:
            raise ZeroDivisionError
        return judge(engine, joined)

    monkeypatch.setattr(VerdictEngine, "judge", fails)
    joining = StoreJoiner(FakeStore(steps=(6, 7, 8)), JoinSettings(database="d"), on_written=results.extend)
    assert joining.turn() == 3
    reasons = {result.joined.step: result.verdict.reason for result in results}
    assert reasons[7] == "The verdict stage failed with ZeroDivisionError; see the log of moetrace join."
    assert "failed" not in reasons[6] + reasons[8]


@pytest.mark.parametrize("where", ["folded", "joined_step", "verdict_rows", "_late", "take"])
def test_a_step_of_which_something_cannot_be_made_holds_up_no_other(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is, it is told as lost, once; the others of its batch are judged."""
    place = JoinLedger if where == "take" else store_joiner
    made = getattr(place, where)

    def fails(*given: Any) -> Any:
        if "step=7," in repr(given):
            raise ZeroDivisionError
        return made(*given)

    monkeypatch.setattr(place, where, fails)
    store, judged, lost = FakeStore(steps=(6, 7, 8)), [], []
    joining = StoreJoiner(
        store,
        JoinSettings(database="d"),
        on_written=lambda results: judged.extend(result.joined.step for result in results),
        on_lost=lambda *what: lost.append(what),
    )
    joining.turn()
    assert joining.turn() == 0
    assert {6, 8} <= set(judged)
    assert [reason for _, _, reason in lost] == ["run r, step 7: ZeroDivisionError: no reason given"]


def test_steps_that_do_not_fit_into_memory_together_are_read_one_by_one() -> None:
    """The same batch would be too large again; one step alone is tried again."""
    store, judged = FakeStore(steps=(6, 7, 8), unreadable=[MemoryError()]), []
    assert joiner(store, judged).turn() == 3
    store, judged = FakeStore(unreadable=[MemoryError()]), []
    joining = joiner(store, judged)
    with pytest.raises(UsageError, match="no memory to read run r, step 7"):
        joining.turn()
    assert (joining.turn(), judged) == (1, [7])


def test_a_step_that_there_is_no_memory_to_judge_is_judged_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no verdict that would stay; those before it are written, and judged once."""
    judge, asked = VerdictEngine.judge, []

    def fails(engine: VerdictEngine, joined: JoinedStep) -> StepVerdict:
        asked.append(joined.step)
        if asked.count(7) == 1 and joined.step == 7:
            raise MemoryError
        return judge(engine, joined)

    monkeypatch.setattr(VerdictEngine, "judge", fails)
    judged: list[int] = []
    joining = joiner(FakeStore(steps=(6, 7, 8)), judged)
    with pytest.raises(UsageError, match="no memory to judge run r, step 7"):
        joining.turn()
    assert judged == [6]
    assert (joining.turn(), judged, asked) == (2, [6, 7, 8], [6, 7, 7, 8])


def test_a_broken_connection_is_a_failed_turn() -> None:
    """It is one line for the user, and the next turn goes on."""
    joining = joiner(FakeStore(unreadable=[ConnectionResetError(104, "reset by peer")]), [])
    with pytest.raises(UsageError, match="reset by peer"):
        joining.turn()
    assert joining.turn() == 1


def test_a_memory_that_could_not_be_read_is_read_again() -> None:
    """The engine must not begin empty because the store was away in its first turn."""
    store = FakeStore(steps=(6, 7), judged={6}, unreadable=[OperationalError("away")])
    joining = joiner(store, [])
    with pytest.raises(UsageError, match="away"):
        joining.turn()
    assert joining.turn() == 1
    assert store.read == [6, 7]


@dataclass
class Watched:
    """The client of a store, and in which order it is used."""

    store: FakeStore
    events: list[str]

    def query(self, query: str, **options: Any) -> Answer:
        """A question."""
        self.events.append("time" if query == NOW else "question")
        return self.store.query(query, **options)

    def insert(self, table: str, data: Any, **options: Any) -> None:
        """A write."""
        self.events.append("write")
        self.store.insert(table, data, **options)


def test_it_is_asked_whether_to_go_on_before_every_question_and_write() -> None:
    """A join that has lost its lease leaves the step to the one that has it, ledger rows above all."""
    events: list[str] = []
    joining = StoreJoiner(Watched(FakeStore(), events), JoinSettings(database="d", timeout_s=1.0))

    def go_on() -> bool:
        events.append("asked")
        return True

    assert joining.turn(go_on=go_on) == 1
    first_write = events.index("write")
    assert events[first_write - 1] == "asked"
    questions = [number for number, event in enumerate(events) if event == "question"]
    assert len(questions) > 5
    assert {events[number - 1] for number in questions} == {"asked"}


def test_a_join_that_must_not_go_on_writes_nothing() -> None:
    """Wherever it is told so; the next turn judges the step, once."""
    for num_answers in range(100):
        store, judged = FakeStore(), []
        joining = joiner(store, judged)
        answers = iter([True] * num_answers)
        if joining.turn(go_on=lambda answers=answers: next(answers, False)):
            break
        assert (judged, store.inserted) == ([], [])
        assert (joining.turn(), joining.turn(), judged) == (1, 0, [7])
    assert num_answers > 5


def test_lost_ledger_rows_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, with the reason: also those that the ledger gives up because too many wait."""
    monkeypatch.setattr(placement_ledger, "MAX_WAITING", 1)
    lost: list[tuple[str, int, str]] = []
    ledger = JoinLedger(
        None,
        database="d",
        ask=lambda sql, parameters: [],
        book=SeriesBook(),
        on_lost=lambda *what: lost.append(what),
    )
    engine, results = VerdictEngine(), []
    for run_id in ("a", "b", "c"):
        ranks = [replace(one, placement_version=1) for one in SyntheticRun(run_id=run_id).step(0)]
        closed = ClosedStep(run_id=run_id, step=0, closed_by=ClosedBy.COMPLETE, closed_ms=0, num_records=2)
        joined = joined_step(closed, ranks)
        results.append(StepResult(joined=joined, verdict=engine.judge(joined), loads=()))
    ledger.take(results)
    assert lost == [("placement_ledger", 2, "too many wait for the store")]


def test_a_stop_ends_a_long_turn() -> None:
    """What is not judged by then is judged by the next turn, none twice."""
    store, judged = FakeStore(steps=range(3 * STEPS_AT_ONCE)), []
    joining = joiner(store, judged)
    assert joining.turn(go_on=lambda: not judged) == STEPS_AT_ONCE
    assert joining.turn() == 2 * STEPS_AT_ONCE
    assert sorted(judged) == list(range(3 * STEPS_AT_ONCE))
    assert store.since_ms[0] == store.since_ms[1], "the rest is looked for as far back"


@pytest.mark.parametrize("document", ["", "null", "[]", '{"terms": 3}', '{"terms": {"max_slowdown": "x"}}'])
def test_a_row_of_the_ledger_that_somebody_changed_holds_up_no_step(
    document: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`moetrace placement verify` says of it; the join goes on, and says what it goes without."""
    row = dict.fromkeys(ledger_rows.LEDGER_COLUMNS)
    row |= dict.fromkeys(("sequence", "version", "previous_version", "rollback_version", "time_unix_ms"), 0)
    store = FakeStore(steps=(6, 7), mappings=[{**row, "event": "announced", "document": document}])
    assert joiner(store, []).turn() == 2
    assert [line.startswith("the terms of run r, version 3: ") for line in caplog.messages] == [True]


def test_no_memory_is_one_line_and_the_turn_is_made_up_for() -> None:
    """Whatever it was wanted for; what was judged by then is written by the next turn, once."""
    store, judged = FakeStore(refused={"step_verdicts": MemoryError()}), []
    joining = joiner(store, judged)
    with pytest.raises(UsageError, match="no memory for this turn"):
        joining.turn()
    store.refused.clear()
    assert (joining.turn(), joining.turn(), judged) == (1, 0, [7])
    assert store.inserted.count("step_verdicts") == 1
