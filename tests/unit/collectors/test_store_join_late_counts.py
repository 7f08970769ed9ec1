"""Counts that come behind a verdict: wherever the join is cut off, their minutes are rolled up again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from clickhouse_connect.driver.exceptions import OperationalError

from moetrace_collectors.errors import UsageError
from moetrace_collectors.store_clock import HOUR_MS, NOW
from moetrace_collectors.store_join import queries, store_joiner
from moetrace_collectors.store_join.store_joiner import (
    RECORDS_AT_ONCE,
    STEPS_AT_ONCE,
    JoinSettings,
    StoreJoiner,
)
from query_answer import Answer

STARTED_NS = 10**18
RECORD = {
    "run_id": "r", "step": 7, "rank": 0, "microbatch": 0, "world_size": 1, "ep_group": 0, "ep_rank": 0,
    "ep_size": 1, "forward_mode": "train", "cohort": "", "model_name": "", "model_version": "",
    "host_name": "", "clock": "host", "sample_period": 1, "placement_version": 0, "warmup": 0,
    "anchor_error_ns": -1, "tracer_ns": -1, "expected_sites": 0, "seen_sites": 0,
    "start_unix_ns": STARTED_NS, "duration_ns": 5,
}  # fmt: skip
COUNTS = {
    "step": 7, "rank": 0, "microbatch": 0, "layer": 0, "kind": "routed", "experts": [0, 1], "counts": [3, 4],
}  # fmt: skip
MARK, WRITE = "rolled_up_minutes", "expert_loads"
RANKS = RECORDS_AT_ONCE // 2


class KilledError(BaseException):
    """The process has ended."""


@dataclass
class FakeStore:
    """A step that is judged, with counts that `expert_loads` has not."""

    calls: list[str] = field(default_factory=list)
    """Tables that rows went to."""
    failures: Iterator[type[BaseException] | None] = field(default_factory=lambda: iter(()))
    """What the next inserts, and questions for the time behind the first, raise."""

    def query(self, query: str, *, parameters: dict[str, Any] | None = None) -> Answer:
        """Answer what the joiner asks."""
        if query == NOW:
            if self.calls:
                self._fail()
            return Answer([{"now": 100 * HOUR_MS}])
        if query == queries.ARRIVED:
            return Answer([{"run_id": "r", "step": 7, "arrivals": 1, "first_ms": 1, "last_ms": 1}])
        if query == queries.STEPS:
            whole = {"records": 1, "world_size": 1, "world_sizes": 1, "num_microbatches": 1}
            return Answer([{**whole, "step": 7}])
        if query in (queries.JUDGED, queries.HAS_UNFOLDED):
            return Answer([{"run_id": "r", "step": 7}])
        if query == queries.UNTOLD:
            return Answer([] if WRITE in self.calls else [{"step": 7}])
        answers = {queries.RANK_STEPS: RECORD, queries.UNFOLDED: COUNTS}
        return Answer([answers[query]] if query in answers else [])

    def insert(self, table: str, data: Any, **options: Any) -> None:
        """Take rows, or fail."""
        self._fail()
        self.calls.append(table)

    def insert_arrow(self, table: str, data: Any, **options: Any) -> None:
        """Take rows, or fail."""
        self.insert(table, data)

    def _fail(self) -> None:
        error = next(self.failures, None)
        if error is not None:
            raise error("away")


def joiner(store: FakeStore, grown: list[tuple[str, int]]) -> StoreJoiner:
    """A joiner that tells which minutes have grown."""
    return StoreJoiner(store, JoinSettings(database="d", timeout_s=1.0), on_grown=grown.extend)


@pytest.mark.parametrize("num_calls", range(4))
def test_a_store_that_goes_away_gets_the_mark_later(num_calls: int) -> None:
    """Counts that are in the store are not found again, so the join itself must know what is left to mark."""
    store = FakeStore(failures=iter([*[None] * num_calls, OperationalError]))
    grown: list[tuple[str, int]] = []
    joining = joiner(store, grown)
    with pytest.raises(UsageError, match="away"):
        joining.turn()
    joining.turn()
    assert store.calls.count(WRITE) == 1
    assert MARK in store.calls[store.calls.index(WRITE) :]
    assert ("r", STARTED_NS) in grown


def test_a_turn_that_must_end_marks_what_it_has_written() -> None:
    """Wherever it is told so: the process may end then, and the next one does not find the counts."""
    for num_answers in range(100):
        store = FakeStore()
        answers = iter([True] * num_answers)
        joiner(store, []).turn(go_on=partial(next, answers, False))
        assert store.calls in ([], [MARK, WRITE, MARK])
    assert store.calls


@pytest.mark.parametrize("num_calls", range(4))
def test_a_process_that_is_killed_leaves_no_counts_without_a_mark(num_calls: int) -> None:
    """The minute is not said to be summed, and the next process has it looked at."""
    store = FakeStore(failures=iter([*[None] * num_calls, KilledError]))
    with pytest.raises(KilledError):
        joiner(store, []).turn()
    assert WRITE not in store.calls or store.calls[0] == MARK


@dataclass
class WideSteps(FakeStore):
    """Steps of many ranks, all with such counts."""

    most: int = 0
    """Rank steps that were read at once."""
    most_compared: int = 0
    """Steps that one question compared."""

    def query(self, query: str, *, parameters: dict[str, Any] | None = None) -> Answer:
        """Answer what the joiner asks."""
        answer = super().query(query, parameters=parameters)
        asked = (parameters or {}).get("steps", range(STEPS_AT_ONCE))
        rows = [{**row, "step": step} for row in answer.rows if "step" in row for step in asked]
        if query == queries.UNTOLD:
            self.most_compared = max(self.most_compared, len(asked))
        if query == queries.STEPS:
            return Answer([{**row, "records": RANKS, "world_size": RANKS} for row in rows])
        if query in (queries.RANK_STEPS, queries.UNFOLDED):
            rows = [{**row, "rank": rank} for row in rows for rank in range(RANKS)]
            self.most = max(self.most, len(rows))
        return Answer(rows) if rows else answer


def test_steps_of_many_ranks_are_read_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts behind verdicts bound memory as steps do that are to be judged, here and in the store."""
    monkeypatch.setattr(store_joiner, "RECORDS_COMPARED", 4 * RANKS)
    store = WideSteps()
    joining = joiner(store, [])
    joining.turn()
    assert store.calls.count(WRITE) == STEPS_AT_ONCE // 2
    assert (store.most, store.most_compared) == (RECORDS_AT_ONCE, 4)
