"""The joiner of a collector that does not join: every rank step goes on as it is, and the store joins.

Any number of such collectors may stand behind a plain balancer: which one a rank reaches does not matter.
None of them sees a whole step, so nothing is late, missing or a repeat here; the ledger holds as

    received == joined + rejected + pending

with `joined` for what was handed to the store. A repeat replaces its row there.
"""

from __future__ import annotations

from dataclasses import dataclass

from moetrace_collectors.joiner import JoinCounts
from moetrace_collectors.model import JoinedStep, RankStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Unjoined:
    """A rank step for the store to join."""

    rank_step: RankStep


class StatelessJoiner:
    """Has no window, so there is never anything to close."""

    def __init__(self) -> None:
        self._received = 0

    @property
    def counts(self) -> JoinCounts:
        """Counts so far; a snapshot."""
        return JoinCounts(received=self._received, joined=self._received)

    @property
    def oldest_mark(self) -> int | None:
        """No step is open."""
        return None

    def begun_unix_ns(self, run_id: str, start_unix_ns: int) -> int:
        """Runs under one id are not told apart here."""
        return 0

    def take_closed(self) -> bytes | None:
        """No step closes here, so there is nothing to remember."""
        return None

    def all_closed(self) -> bytes:
        """The same."""
        return b""

    def remember(self, closed: bytes) -> None:
        """What a joiner knew before is of no use here: a repeat replaces its rows in the store."""

    def add(self, rank_step: RankStep, *, now_ns: int, mark: int = 0) -> tuple[Unjoined, ...]:
        """Hand one rank step on."""
        self._received += 1
        return (Unjoined(rank_step=rank_step),)

    def tick(self, *, now_ns: int) -> tuple[JoinedStep, ...]:
        """Nothing waits."""
        return ()

    def flush(self) -> tuple[JoinedStep, ...]:
        """Nothing waits."""
        return ()
