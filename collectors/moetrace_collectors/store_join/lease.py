"""Which of several `moetrace join` is at work in a store; the others stand by.

So nothing is written twice: a verdict that is replaces the other, but a ledger keeps every row.

Each says every turn that it lives, by the clock of the store; of those that have said so within a minute,
the one that began first is at work::

    A  begun 10:00   beats ............ killed
    B  begun 10:05   stands by ................(a minute)| at work

One that could not reach the store for half a minute, or was stopped for so long, counts as newly begun:
another one may have been at work, and may have ended again. A thread says it while a turn is under way,
whatever the turn waits for.

Where the store's clock is put back, what was said before comes from the future: it does not count, and
everyone begins anew under another name, because of one name the store keeps the latest sign only. The old
name leaves behind that sign too, or it would come to life when the clock gets there again. Where the clock is
put forward by a minute, two may be at work until the next turn of each.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from moetrace_collectors.store_errors import store_answers

LEASE_S = 60
"""One that has not said for so long that it lives is dead."""
LONGEST_GAP_S = 30.0
BEAT_S = 5.0
"""Between two signs of life within a long turn."""
US_PER_S = 1_000_000

BEAT = """
INSERT INTO {database:Identifier}.join_leases (holder, run_id, begun_at, beat_at, has_left)
SELECT {holder:String}, {run:String},
       if({begun_us:Int64} = 0, now64(6), fromUnixTimestamp64Micro({begun_us:Int64})),
       if({at_us:Int64} = 0, now64(6), fromUnixTimestamp64Micro({at_us:Int64})), {left:UInt8}
"""
HOLDERS = """
SELECT holder, begun_us, toUnixTimestamp64Micro(now64(6)) AS now_us
FROM
(
    SELECT '' AS holder, toInt64(0) AS begun_us
    UNION ALL
    SELECT holder, toUnixTimestamp64Micro(argMax(begun_at, beat_at)) AS begun_us
    FROM {database:Identifier}.join_leases
    WHERE beat_at >= now64(6) - toIntervalSecond({lease_s:UInt32})
      AND beat_at <= now64(6) + toIntervalSecond(3 * {lease_s:UInt32})
      AND ({run:String} = '' OR run_id = '' OR run_id = {run:String})
    GROUP BY holder
    HAVING argMax(has_left, beat_at) = 0 AND max(beat_at) <= now64(6) + toIntervalSecond({lease_s:UInt32})
)
ORDER BY begun_us, holder
"""
"""The store's clock, and, in the rows with a name, those that live and join the same runs, the one that is at
work first. Looks further ahead than it believes a sign, so that a name which has left there is seen to have
before its last sign of life counts."""


class JoinLease:
    """One process's place among those that join; thread-safe."""

    def __init__(
        self,
        client: Any,
        *,
        database: str,
        run_id: str,
        clock_s: Callable[[], float],
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        """Nothing is said yet.

        Args:
            client: clickhouse-connect client of a migrated store, for nothing else; closed by the caller.
            database: holds the tables.
            run_id: the run that is joined; empty: all.
            clock_s: monotonic.
            wait: for an event, so many seconds; whether it was set.
        """
        self._client = client
        self._bound = {"database": database, "run": run_id}
        self._clock_s = clock_s
        self._wait = wait
        self._lock = threading.Lock()
        self.name = _new_name()
        self.term = 0
        """How often it has begun: where that has changed, another one may have been at work."""
        self._begun_us = 0
        self._store_us = 0
        """The store's clock, when it was asked last."""
        self._beat_s: float | None = None
        self._at_work = ""

    @property
    def is_shown(self) -> bool:
        """Whether the store showed anyone at work, when it was asked last; a replica may lag."""
        return bool(self._at_work)

    def holds(self) -> bool:
        """Say that this process lives; whether it is the one at work. What it raises is the store's."""
        with self._lock:
            return self._holds()

    def keeps(self) -> bool:
        """The same in the middle of work; asks only now and then."""
        with self._lock:
            if self._beat_s is not None and self._clock_s() - self._beat_s < BEAT_S:
                return self._at_work == self.name
            return self._holds()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Say so now and then, from a thread, until the block ends."""
        ended = threading.Event()
        thread = threading.Thread(target=self._beat_until, args=(ended,), name="moetrace-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _beat_until(self, ended: threading.Event) -> None:
        from clickhouse_connect.driver.exceptions import ClickHouseError

        while not self._wait(ended, BEAT_S):
            # Who works asks too, and says what is wrong.
            with suppress(ClickHouseError, OSError):
                self.keeps()

    def _holds(self) -> bool:
        now_s = self._clock_s()
        if self._beat_s is None or now_s - self._beat_s > LONGEST_GAP_S:
            self._begin()
        rows = self._beat_and_see()
        store_us = int(rows[0]["now_us"])
        if store_us < self._store_us - LEASE_S * US_PER_S:
            # Its last sign may have been given since the store was asked for its clock.
            since_s = 0.0 if self._beat_s is None else now_s - self._beat_s
            self._beat(left=1, at_us=self._store_us + int(since_s * US_PER_S) + 1)
            self._beat(left=1)
            self.name = _new_name()
            self._begin()
            rows = self._beat_and_see()
        self._store_us = store_us
        begun_us = {str(row["holder"]): int(row["begun_us"]) for row in rows if row["holder"]}
        # A replica may not have it yet: then nobody knows who was first.
        self._begun_us = begun_us.get(self.name, self._begun_us)
        self._beat_s = now_s
        self._at_work = next(iter(begun_us), "")
        return self._at_work == self.name

    def _begin(self) -> None:
        self._begun_us = 0
        self.term += 1

    def _beat_and_see(self) -> list[Mapping[str, Any]]:
        self._beat(left=0)
        asked = {**self._bound, "lease_s": LEASE_S}
        return list(self._client.query(HOLDERS, parameters=asked).named_results())

    def leave(self) -> None:
        """Let the next one begin at once; where the store does not answer, it begins in a minute."""
        from clickhouse_connect.driver.exceptions import ClickHouseError

        with self._lock:
            if self._beat_s is not None:
                with suppress(ClickHouseError, OSError):
                    self._beat(left=1)
            self._beat_s = None

    def _beat(self, *, left: int, at_us: int = 0) -> None:
        """Say it, of now or of another time."""
        values: Mapping[str, Any] = {
            "holder": self.name,
            "begun_us": self._begun_us,
            "left": left,
            "at_us": at_us,
        }
        self._client.command(BEAT, parameters={**self._bound, **values})


def _new_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class Turns(Protocol):
    """What does something each turn."""

    def turn(self, *, go_on: Callable[[], bool] = ...) -> int:
        """How many steps were judged; see StoreJoiner."""


class StandIn:
    """Joins while it holds the lease, with a joiner that begins when it gets it."""

    def __init__(
        self, lease: JoinLease, begin: Callable[[], Turns], *, on_standing_by: Callable[[bool], None]
    ) -> None:
        """Take what says who is at work.

        Args:
            lease: of this process.
            begin: makes the joiner.
            on_standing_by: told whether another one is known to be at work; else this one's own
                sign of life does not show yet. Once it is known, not again.
        """
        self._lease = lease
        self._begin = begin
        self._on_standing_by = on_standing_by
        self._joiner: Turns | None = None
        self._term = 0
        """Of the lease, when the joiner began."""
        self._has_said = False

    def turn(self, *, go_on: Callable[[], bool] = lambda: True) -> int:
        """One turn of the joiner, or nothing where another process is at work.

        Raises:
            UsageError: the store does not answer.
        """
        with store_answers():
            holds = self._lease.holds()
        if not holds:
            # What it remembers is not what the one at work does.
            self._joiner = None
            if not self._has_said:
                self._on_standing_by(self._lease.is_shown)
            self._has_said = self._has_said or self._lease.is_shown
            return 0
        self._has_said = False
        if self._joiner is None or self._term != self._lease.term:
            self._term, self._joiner = self._lease.term, self._begin()
        with self._lease.beating():
            return self._joiner.turn(go_on=lambda: go_on() and self._keeps())

    def _keeps(self) -> bool:
        keeps = self._lease.keeps() and self._term == self._lease.term
        if not keeps:
            # Another one may judge what it has judged and not written, also if that one ends at once.
            self._joiner = None
        return keeps
