"""A roll-up goes on past what it cannot do, and reads no more than it must."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from clickhouse_connect.driver.exceptions import DatabaseError, OperationalError

from moetrace_collectors.errors import UsageError
from moetrace_collectors.roll_ups import queries
from moetrace_collectors.roll_ups.failures import FIRST_DELAY_S, LONGEST_DELAY_S, FailedMinutes
from moetrace_collectors.roll_ups.minutes import STRETCH_MINUTES, Minute, stretches
from moetrace_collectors.roll_ups.roll_up import MINUTES_AT_ONCE, RollUp, RollUpSettings
from moetrace_collectors.store_clock import NOW
from query_answer import Answer

TOO_LARGE = DatabaseError("Code: 241. memory limit exceeded\nat length", code=241)


@dataclass
class FakeStore:
    """Minutes with one rank step each."""

    written: dict[Minute, int]
    """Number of rank steps."""
    broken: dict[Minute, Exception] = field(default_factory=dict)
    """Minutes that cannot be summed."""
    rolled_up: dict[Minute, int] = field(default_factory=dict)
    is_away: bool = False
    counted: list[tuple[int, int]] = field(default_factory=list)
    """Bounds of queries for rank steps."""
    sums: list[tuple[int, int]] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)

    def query(
        self,
        query: str,
        *,
        parameters: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> Answer:
        """Answer what a roll-up asks."""
        if self.is_away:
            raise OperationalError("no route to host")
        if query == NOW:
            return Answer([{"now": 10**12}])
        assert parameters is not None
        if query == queries.WRITTEN:
            return Answer([{"run_id": run, "minute": start} for run, start in self.written])
        if query == queries.RANK_STEPS:
            self.counted.append((parameters["first"], parameters["end"]))
            return Answer(
                [
                    {"run_id": run, "minute": start, "number": number, "first_step": 1, "last_step": 1}
                    for (run, start), number in self._between(self.written, parameters).items()
                ]
            )
        if query == queries.ROLLED_UP:
            return Answer(
                [
                    {"run_id": run, "minute_s": start, "rank_steps": number, "verdicts": 0}
                    for (run, start), number in self._between(self.rolled_up, parameters).items()
                ]
            )
        return Answer([])

    def command(self, sql: str, *, parameters: dict[str, Any], settings: dict[str, Any]) -> None:
        """Sum, or fail."""
        self.settings.append(settings)
        self.sums.append((parameters["first"], parameters["end"]))
        for minute in self._between(self.broken, parameters):
            if minute[0] == parameters["run"]:
                raise self.broken[minute]

    def insert(self, table: str, data: list[list[Any]], **options: Any) -> None:
        """Note minutes."""
        assert table == "rolled_up_minutes"
        self.rolled_up |= {(run, start): number for run, start, number, _, _ in zip(*data, strict=True)}

    @staticmethod
    def _between(minutes: dict[Minute, Any], parameters: dict[str, Any]) -> dict[Minute, Any]:
        first, end = parameters["first"], parameters["end"]
        return {minute: value for minute, value in minutes.items() if first <= minute[1] < end}


class Clock:
    """Time that the test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now_s


def roll_up(store: FakeStore, clock: Clock | None = None) -> RollUp:
    """Everything is due at once."""
    settings = RollUpSettings(database="d", look_back_ms=0, settle_s=0)
    return RollUp(store, settings, clock_s=clock or Clock())


def minutes(*numbers: int, run: str = "r") -> dict[Minute, int]:
    """Minutes by number, one rank step each."""
    return {(run, 60 * number): 1 for number in numbers}


@pytest.mark.parametrize("everything", [False, True])
def test_a_minute_that_fails_does_not_stop_the_others(everything: bool) -> None:
    """The span it is in is tried minute by minute; runs behind it go on; it is said at the end."""
    store = FakeStore({**minutes(*range(1, 6)), **minutes(3, run="s")}, broken={("r", 180): TOO_LARGE})
    with pytest.raises(UsageError, match=r"^1 minute could not .* run r first, .*memory limit exceeded$"):
        roll_up(store).turn(everything=everything)
    assert store.rolled_up == {**minutes(1, 2, 4, 5), **minutes(3, run="s")}


def test_a_minute_that_failed_is_tried_alone_and_less_and_less_often() -> None:
    """Its neighbours never wait for it again, and once it works it is forgotten."""
    store = FakeStore(minutes(1, 2, 3), broken={("r", 120): TOO_LARGE})
    clock = Clock()
    rolling = roll_up(store, clock)
    with pytest.raises(UsageError):
        rolling.turn()
    store.written = {("r", 60): 2, ("r", 120): 2, ("r", 180): 2}
    store.sums.clear()
    assert rolling.turn() == 2
    assert set(store.sums) == {(60, 120), (180, 240)}, "its time has not come"
    clock.now_s += FIRST_DELAY_S
    with pytest.raises(UsageError, match="1 minute could"):
        rolling.turn()
    store.broken.clear()
    clock.now_s += FIRST_DELAY_S
    assert rolling.turn() == 0
    clock.now_s += FIRST_DELAY_S
    assert rolling.turn() == 1
    assert store.rolled_up == store.written


def test_delays_grow_to_a_longest_one() -> None:
    """A minute that never works costs little."""
    failures, now_s, delays = FailedMinutes(), 0.0, []
    for _ in range(9):
        failures.failed(("r", 60), now_s)
        began_s = now_s
        while failures.held_back(now_s):
            now_s += 10
        delays.append(now_s - began_s)
    assert delays == [10, 20, 40, 80, 160, 320, LONGEST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S]
    failures.done([("r", 60)])
    assert failures.minutes == frozenset()


def test_a_store_that_goes_away_ends_the_turn() -> None:
    """The other spans would each wait for it in vain; the driver's error says so."""

    class Leaving(FakeStore):
        def command(self, sql: str, *, parameters: dict[str, Any], settings: dict[str, Any]) -> None:
            """Away from here on."""
            self.sums.append((parameters["first"], parameters["end"]))
            self.is_away = True
            raise OperationalError("no route to host")

    store = Leaving({**minutes(1), **minutes(500)})
    rolling = roll_up(store)
    with pytest.raises(OperationalError):
        rolling.turn()
    assert len(store.sums) == 1


def test_a_wrong_date_is_counted_by_itself() -> None:
    """Nothing between it and now is read."""
    now = 30_000_000
    store = FakeStore(minutes(17_000_000, now, now + 1))
    assert roll_up(store).turn() == 3
    assert sorted(store.counted) == [
        (60 * 17_000_000, 60 * 17_000_001),
        (60 * now, 60 * (now + 2)),
    ]


def test_stretches_are_no_longer_than_a_query_may_read() -> None:
    """All minutes are in one of them, in order."""
    found = stretches(minutes(*range(2 * STRETCH_MINUTES + 1)))
    assert [len(one) for one in found] == [STRETCH_MINUTES, STRETCH_MINUTES, 1]
    assert frozenset().union(*found) == frozenset(minutes(*range(2 * STRETCH_MINUTES + 1)))


def test_minutes_of_one_turn_are_bounded() -> None:
    """What is left is done by the next turns; the last one before an end does all."""
    store = FakeStore(minutes(*range(2 * MINUTES_AT_ONCE + 5)))
    rolling = roll_up(store)
    assert [rolling.turn(), rolling.turn(), rolling.turn()] == [MINUTES_AT_ONCE, MINUTES_AT_ONCE, 5]
    store = FakeStore(minutes(*range(2 * MINUTES_AT_ONCE + 5)))
    assert roll_up(store).turn(everything=True) == 2 * MINUTES_AT_ONCE + 5


def test_sums_are_sharded_by_minute() -> None:
    """Since 25.7 a server's own way of INSERT .. SELECT leaves sums on the shard of their rows."""
    store = FakeStore(minutes(1))
    roll_up(store).turn()
    assert {settings["parallel_distributed_insert_select"] for settings in store.settings} == {0}
