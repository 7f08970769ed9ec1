"""Turn after turn of a join, until it is stopped."""

from __future__ import annotations

from collections.abc import Callable

from moetrace_collectors.errors import UsageError
from moetrace_collectors.store_join.lease import Turns

LONGEST_WAIT_S = 30.0
"""Between two turns while the store is away."""


def join_until(
    joiner: Turns,
    *,
    stopped: Callable[[float], bool],
    interval_s: float,
    on_turn: Callable[[int], None],
    on_failed: Callable[[UsageError], None],
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Turn after turn until `stopped`, which waits for so many seconds, says so.

    A store that is away is asked again, each time after a longer wait. A turn with much to do ends early
    once `go_on` says no.
    """
    wait_s = interval_s
    while True:
        try:
            on_turn(joiner.turn(go_on=go_on))
            wait_s = interval_s
        except UsageError as error:
            on_failed(error)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        if stopped(wait_s):
            return
