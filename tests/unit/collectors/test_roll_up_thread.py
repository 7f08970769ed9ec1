"""The thread that rolls up outlives a store that is away, and does the rest when it is stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from moetrace_collectors.roll_ups.minutes import Minute
from moetrace_collectors.roll_ups.roll_up import RollUp
from moetrace_collectors.roll_ups.thread import RollUpThread


@dataclass
class FakeRollUp:
    """Fails as often as told, and remembers its turns."""

    failures: int = 0
    turns: list[tuple[frozenset[Minute], bool]] = field(default_factory=list)
    turned: threading.Event = field(default_factory=threading.Event)

    def turn(self, *, touched: frozenset[Minute], everything: bool, go_on: Callable[[], bool]) -> int:
        """Remember it."""
        self.turns.append((touched, everything))
        if len(self.turns) > self.failures:
            self.turned.set()
            return 0
        raise OSError("no route to host\nat all")


def thread(roll_up: FakeRollUp, on_failed: Callable[[], None], **options: Any) -> RollUpThread:
    """A thread over it."""
    return RollUpThread(cast(RollUp, roll_up), on_failed=on_failed, **options)


def test_a_store_that_is_away_delays(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are counted and said once; what was touched is looked at again."""
    roll_up, failures = FakeRollUp(failures=3), []
    rolling = thread(roll_up, lambda: failures.append(1), interval_s=0.001)
    rolling.touch([("run", 125 * 10**9)])
    with caplog.at_level(logging.WARNING):
        rolling.start()
        assert roll_up.turned.wait(20)
        rolling.stop(timeout_s=10)
    assert len(failures) == 3
    assert [touched for touched, _ in roll_up.turns[:4]] == [frozenset({("run", 120)})] * 4
    assert [record.getMessage() for record in caplog.records] == ["roll-ups by minute wait: no route to host"]


def test_the_last_turn_takes_everything() -> None:
    """A stop rolls up what would not be due yet."""
    roll_up = FakeRollUp()
    rolling = thread(roll_up, lambda: None, interval_s=1000)
    rolling.start()
    rolling.stop(timeout_s=10)
    assert roll_up.turns == [(frozenset(), True)]


def test_a_stop_without_time_leaves_it_to_the_next_start() -> None:
    """Where the store is away there is no last turn."""
    roll_up = FakeRollUp()
    rolling = thread(roll_up, lambda: None, interval_s=1000)
    rolling.start()
    rolling.stop(timeout_s=0)
    assert roll_up.turns == []
