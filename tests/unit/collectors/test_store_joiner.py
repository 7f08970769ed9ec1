"""`moetrace join` outlives a store that is away: it looks back to its last turn and judges no step twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from clickhouse_connect.driver.exceptions import OperationalError

from moetrace_collectors.errors import UsageError
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.store_join import queries
from moetrace_collectors.store_join.store_joiner import RECENT_MS, JoinSettings, StoreJoiner, join_until

HOUR_MS = 3_600_000
RECORD = {
    "run_id": "r", "step": 7, "rank": 0, "microbatch": 0, "world_size": 1, "ep_group": 0, "ep_rank": 0,
    "ep_size": 1, "forward_mode": "train", "cohort": "", "model_name": "", "model_version": "",
    "host_name": "", "clock": "host", "sample_period": 1, "placement_version": 0, "warmup": 0,
    "anchor_error_ns": -1, "tracer_ns": -1, "expected_sites": 0, "seen_sites": 0,
    "start_unix_ns": 10**18, "duration_ns": 5,
}  # fmt: skip


@dataclass
class Answer:
    """What a query returns."""

    rows: list[dict[str, Any]]

    @property
    def result_rows(self) -> list[list[Any]]:
        """Rows without names."""
        return [list(row.values()) for row in self.rows]

    def named_results(self) -> list[dict[str, Any]]:
        """Rows by name."""
        return self.rows


@dataclass
class FakeStore:
    """One whole step of one rank; takes inserts unless told to fail."""

    now_ms: int = 100 * HOUR_MS
    failures: list[str] = field(default_factory=list)
    """Tables whose next insert fails."""
    is_away: bool = False
    inserted: list[str] = field(default_factory=list)
    since_ms: list[int] = field(default_factory=list)

    def query(self, query: str, *, parameters: dict[str, Any] | None = None) -> Answer:
        """Answer what the joiner asks."""
        if self.is_away:
            raise OperationalError("no route to host")
        if query == queries.NOW:
            return Answer([{"now": self.now_ms}])
        if query == queries.STEPS:
            assert parameters is not None
            self.since_ms.append(parameters["since_ms"])
            step = {"run_id": "r", "step": 7, "records": 1, "world_size": 1, "world_sizes": 1}
            return Answer([{**step, "num_microbatches": 1, "first_ms": 1, "last_ms": 1}])
        return Answer([RECORD] if query == queries.RANK_STEPS else [])

    def insert(self, table: str, data: Any, **options: Any) -> None:
        """Take rows, or fail."""
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
