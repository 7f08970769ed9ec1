"""Calls that are waited for only so long; the test holds the work."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from moetrace_collectors import overdue
from moetrace_collectors.overdue import BusyError, EndingError, OverdueError, Places

PATIENCE_S = 30.0


class Work:
    """Ends when the test says so."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> str:
        """Work."""
        self.began.set()
        assert self.may_end.wait(PATIENCE_S)
        return "done"


@pytest.fixture
def work() -> Iterator[Work]:
    """Some work, which ends with the test."""
    work = Work()
    yield work
    work.may_end.set()


def until_idle(places: Places[str]) -> None:
    """Return once nothing runs."""
    for _ in range(int(PATIENCE_S * 100)):
        if not places.num_running:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{places.num_running} calls run")


def test_what_ends_in_time_is_returned_or_raised() -> None:
    """As if it had been called, and its place is free again."""
    places: Places[str] = Places(1)
    for _ in range(3):
        assert places.call(lambda: "done", wait_s=PATIENCE_S) == "done"
        with pytest.raises(ZeroDivisionError):
            places.call(lambda: str(1 // 0), wait_s=PATIENCE_S)
    assert places.num_running == 0


def test_what_is_overdue_keeps_its_place_until_it_ends(monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    """Its caller goes on; with all places taken so, others are told to come back."""
    monkeypatch.setattr(overdue, "BUSY_WAIT_S", 0.0)
    places: Places[str] = Places(2)
    with pytest.raises(OverdueError):
        places.call(work, wait_s=0.0)
    assert work.began.wait(PATIENCE_S)
    assert places.call(lambda: "another", wait_s=PATIENCE_S) == "another"
    second = Work()
    with pytest.raises(OverdueError):
        places.call(second, wait_s=0.0)
    with pytest.raises(BusyError):
        places.call(lambda: "a third", wait_s=PATIENCE_S)
    assert places.num_running == 2
    for one in (work, second):
        one.may_end.set()
    until_idle(places)
    assert places.call(lambda: "again", wait_s=PATIENCE_S) == "again"


def test_an_end_waits_for_nobody(work: Work) -> None:
    """Whoever waits is let go, and nothing is begun any more; what runs is known to run."""
    places: Places[str] = Places(2)
    raised: list[type[Exception]] = []

    def call() -> None:
        try:
            places.call(work, wait_s=PATIENCE_S)
        except EndingError as error:
            raised.append(type(error))

    caller = threading.Thread(target=call)
    caller.start()
    assert work.began.wait(PATIENCE_S)
    places.end(wait_s=0.0)
    caller.join(PATIENCE_S)
    assert raised == [EndingError]
    with pytest.raises(EndingError):
        places.call(lambda: "late", wait_s=PATIENCE_S)
    assert places.num_running == 1
    work.may_end.set()
    until_idle(places)


def test_a_call_without_a_thread_leaves_its_place_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has no thread left for a moment refuses, and works again once it has."""
    monkeypatch.setattr(overdue, "BUSY_WAIT_S", 0.0)
    places: Places[str] = Places(1)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(BusyError):
                places.call(lambda: "done", wait_s=PATIENCE_S)
            assert places.num_running == 0
    assert places.call(lambda: "done", wait_s=PATIENCE_S) == "done"
