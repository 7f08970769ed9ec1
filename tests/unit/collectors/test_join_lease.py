"""A `moetrace join` that works for long keeps its lease, whatever it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moetrace_collectors.store_join.lease import BEAT, HOLDERS, LEASE_S, JoinLease, StandIn
from query_answer import Answer

DEADLOCK_S = 60.0


@dataclass
class FakeStore:
    """Signs of life by the clock that everyone shares."""

    now_s: float = 0.0
    beats: dict[str, tuple[float, int]] = field(default_factory=dict)
    """(when, begun us) by holder, the last one."""
    has_beaten: threading.Condition = field(default_factory=threading.Condition)

    def command(self, query: str, *, parameters: dict[str, Any]) -> None:
        """A sign of life."""
        assert query == BEAT
        with self.has_beaten:
            begun_us = parameters["begun_us"] or int(self.now_s * 1e6) + 1
            self.beats[parameters["holder"]] = (self.now_s, begun_us)
            self.has_beaten.notify_all()

    def query(self, query: str, *, parameters: dict[str, Any]) -> Answer:
        """Who lives."""
        assert query == HOLDERS
        living = [(begun, name) for name, (at, begun) in self.beats.items() if at >= self.now_s - LEASE_S]
        return Answer([{"holder": name, "begun_us": begun} for begun, name in sorted(living)])

    def lease(self, *, silent: bool = False) -> JoinLease:
        """Of a further process, whose thread looks at the clock all the time, or not at all."""
        return JoinLease(
            self,
            database="d",
            run_id="",
            clock_s=lambda: self.now_s,
            wait=lambda ended, seconds: ended.wait(DEADLOCK_S if silent else 0.001),
        )


@dataclass
class LongTurn:
    """A joiner that asks one long question; another process tries to begin meanwhile."""

    store: FakeStore
    name: str
    other: JoinLease
    other_held: list[bool] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)

    def turn(self, *, go_on: Callable[[], bool] = lambda: True) -> int:
        """A minute and a half."""
        for _ in range(9):
            self.store.now_s += 10.0
            with self.store.has_beaten:
                assert self.store.has_beaten.wait_for(
                    lambda: self.store.beats[self.name][0] == self.store.now_s, timeout=DEADLOCK_S
                ), "no sign of life"
            self.other_held.append(self.other.holds())
        self.kept.append(go_on())
        return 1


def test_a_question_that_takes_longer_than_the_lease_does_not_lose_it() -> None:
    """Two joins whose first look is long would else take turns for ever, and judge nothing."""
    store = FakeStore()
    lease, other = store.lease(), store.lease()
    joiner = LongTurn(store, lease.name, other)
    assert StandIn(lease, lambda: joiner, on_standing_by=lambda is_shown: None).turn() == 1
    assert joiner.other_held == [False] * 9
    assert joiner.kept == [True]


def test_a_lease_that_was_lost_is_not_kept() -> None:
    """Who was cut off for longer than the lease is told so in the middle of its work."""
    store = FakeStore()
    lease, other = store.lease(), store.lease()
    assert lease.holds()
    store.now_s += LEASE_S + 1.0
    assert other.holds()
    store.now_s += 1.0
    assert [lease.keeps(), lease.keeps()] == [False, False]


@dataclass
class CutOff:
    """A joiner whose process is stopped for longer than the lease; another one begins meanwhile, and ends."""

    store: FakeStore
    other: JoinLease

    def turn(self, *, go_on: Callable[[], bool] = lambda: True) -> int:
        """Work that was not written when the lease was lost."""
        self.store.now_s += LEASE_S + 1.0
        self.other.holds()
        self.store.now_s += 1.0
        assert not go_on()
        self.store.beats.pop(self.other.name)
        return 0


def test_a_joiner_that_lost_its_lease_does_not_go_on() -> None:
    """Another one may have written what it has not; who gets the lease back begins anew."""
    store = FakeStore()
    lease, other = store.lease(silent=True), store.lease()
    begun: list[CutOff] = []

    def begin() -> CutOff:
        begun.append(CutOff(store, other))
        return begun[-1]

    stand_in = StandIn(lease, begin, on_standing_by=lambda is_shown: None)
    assert [stand_in.turn(), stand_in.turn()] == [0, 0]
    assert len(begun) == 2
