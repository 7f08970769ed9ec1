"""The one place that swallows our own failures: counted per stage, logged once, off in the end."""

from __future__ import annotations

import logging

import pytest

from moetrace.guard import FAILURES_BEFORE_OFF, Guard


def failing() -> None:
    """A fault of ours."""
    raise RuntimeError("of the tracer")


def test_a_failure_is_counted_by_stage_and_not_raised() -> None:
    """Stages do not share a count."""
    guard = Guard()
    assert guard.run("counts", failing) is False
    assert guard.run("counts", failing) is False
    assert guard.run("padding", failing) is False
    assert guard.errors == {"counts": 2, "padding": 1}


def test_what_does_not_fail_runs_with_its_arguments() -> None:
    """Positional and keyword arguments arrive."""
    calls = []
    assert Guard().run("stage", lambda a, b: calls.append((a, b)), 1, b=2) is True
    assert calls == [(1, 2)]


def test_a_stage_that_keeps_failing_is_switched_off() -> None:
    """It is not called any more, and its count stands still; other stages go on."""
    guard, calls = Guard(), []

    def failing_and_noting() -> None:
        calls.append(1)
        failing()

    for _ in range(FAILURES_BEFORE_OFF + 10):
        guard.run("counts", failing_and_noting)
    assert len(calls) == FAILURES_BEFORE_OFF
    assert guard.errors == {"counts": FAILURES_BEFORE_OFF}
    assert guard.is_off("counts")
    assert guard.run("padding", lambda: None) is True


def test_a_stage_logs_its_first_failure_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Two lines, whatever the number of failures; both say that it is ours."""
    guard = Guard()
    with caplog.at_level(logging.WARNING, "moetrace"):
        for _ in range(100):
            guard.run("counts", failing)
    assert caplog.messages == [
        "moetrace: stage counts failed (RuntimeError: of the tracer); the model is not affected; "
        "counted from here on",
        f"moetrace: stage counts failed {FAILURES_BEFORE_OFF} times and is now off",
    ]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_meant_for_the_process_is_not_swallowed(kind: type[BaseException]) -> None:
    """Only failures are; a user's interrupt goes on."""

    def interrupted() -> None:
        raise kind

    guard = Guard()
    with pytest.raises(kind):
        guard.run("counts", interrupted)
    assert guard.errors == {}
