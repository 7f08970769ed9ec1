"""A `moetrace join` that works for long keeps its lease, whatever it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from moetrace_collectors.store_join.lease import BEAT, HOLDERS, LEASE_S, JoinLease, StandIn
from query_answer import Answer

DEADLOCK_S = 60.0


@dataclass
class FakeStore:
    """Signs of life by the clock of the store."""

    now_s: float = 0.0
    """Of the processes; the store's is this and `set_s`."""
    set_s: float = 1_000_000.0
    beats: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """(when, begun us, has left) by holder, times in us."""
    has_merged: bool = True
    """Of each name the sign with the latest time is left."""
    has_beaten: threading.Condition = field(default_factory=threading.Condition)

    def command(self, query: str, *, parameters: dict[str, Any]) -> None:
        """A sign of life."""
        assert query == BEAT
        with self.has_beaten:
            now_us, name = self.now_us, parameters["holder"]
            # Nobody begins at the very same moment.
            begun_us = parameters["begun_us"] or now_us + len(self.beats)
            signs = self.beats.setdefault(name, [])
            signs.append((parameters["at_us"] or now_us, begun_us, parameters["left"]))
            if self.has_merged:
                # Of two at one time the later one.
                self.beats[name] = [max(reversed(signs), key=lambda sign: sign[0])]
            self.has_beaten.notify_all()

    def query(self, query: str, *, parameters: dict[str, Any]) -> Answer:
        """Who lives."""
        assert query == HOLDERS
        now_us, lease_us = self.now_us, parameters["lease_s"] * 1_000_000
        living = []
        for name, signs in self.beats.items():
            looked_at = [sign for sign in signs if -lease_us <= sign[0] - now_us <= 3 * lease_us]
            at_us, begun_us, has_left = max(reversed(looked_at), key=lambda sign: sign[0], default=(0, 0, 1))
            if not has_left and at_us - now_us <= lease_us:
                living.append((begun_us, name))
        rows = [{"holder": name, "begun_us": begun} for begun, name in [(0, ""), *sorted(living)]]
        return Answer([{**row, "now_us": now_us} for row in rows])

    @property
    def now_us(self) -> int:
        """The store's clock."""
        return int((self.now_s + self.set_s) * 1e6)

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
                    lambda: self.store.beats[self.name][-1][0] == self.store.now_us,
                    timeout=DEADLOCK_S,
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


@dataclass
class Stopped:
    """A joiner whose process is stopped after its turn; what it does then."""

    turns: int = 0

    def turn(self, *, go_on: Callable[[], bool] = lambda: True) -> int:
        """Work."""
        assert go_on()
        self.turns += 1
        return self.turns


def test_a_joiner_that_was_stopped_for_long_does_not_go_on() -> None:
    """Another one may have begun, judged what this one had not written, and ended, all unseen."""
    store = FakeStore()
    lease, other = store.lease(silent=True), store.lease(silent=True)
    stand_in = StandIn(lease, Stopped, on_standing_by=lambda is_shown: None)
    assert [stand_in.turn(), stand_in.turn()] == [1, 2]
    store.now_s += LEASE_S + 1.0
    assert other.holds()
    other.leave()
    store.now_s += LEASE_S + 1.0
    assert [stand_in.turn(), stand_in.turn()] == [1, 2]


def test_one_is_at_work_when_the_clock_of_the_store_is_put_back() -> None:
    """Signs of life from the future neither count nor hide those of now, whoever notices first."""
    store = FakeStore()
    first, second = store.lease(), store.lease()
    assert (first.holds(), second.holds()) == (True, False)
    store.set_s -= 3_600.0
    store.now_s += 1.0
    held = []
    for _ in range(200):
        store.now_s += 1.0
        held.append((second.holds(), first.holds()))
    assert held[0] in {(True, False), (False, True)}
    assert set(held) == {held[0]}, "one and always the same"


def test_who_has_died_before_the_clock_was_put_back_is_not_waited_for() -> None:
    """Else nobody would join for as long as it was put back."""
    store = FakeStore()
    dead = store.lease()
    assert dead.holds()
    store.set_s -= 3_600.0
    store.now_s += 1.0
    assert store.lease().holds()


@pytest.mark.parametrize("has_merged", [True, False])
def test_a_name_of_before_stays_gone_when_the_clock_gets_there_again(has_merged: bool) -> None:
    """The last signs of the old names are of that time, and must not hold up who is at work then."""
    store = FakeStore(has_merged=has_merged)
    first, second = store.lease(), store.lease()
    held = []
    for _ in range(30):
        held.append((first.holds(), second.holds()))
        store.now_s += 5.0
    assert set(held) == {(True, False)}
    store.set_s -= 3_600.0
    held = []
    for _ in range(3_600 // 5 + 60):
        held.append((first.holds(), second.holds()))
        store.now_s += 5.0
    assert set(held[1:]) == {held[1]}, "one and always the same"
    assert sorted(held[1]) == [False, True]


def test_a_sign_of_which_the_store_did_not_tell_the_time_is_left_behind_too() -> None:
    """The clock was asked a while before it was put back; signs were given since, and their answers lost."""
    store = FakeStore()
    first = store.lease()
    assert first.holds()
    name = first.name
    store.now_s += 20.0
    store.command(
        BEAT, parameters={"holder": name, "begun_us": store.beats[name][0][1], "left": 0, "at_us": 0}
    )
    store.set_s -= 3_600.0
    store.now_s += 1.0
    assert first.holds()
    assert name != first.name
    assert [has_left for _, _, has_left in store.beats[name]] == [1]
