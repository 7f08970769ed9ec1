"""What `moetrace demo --keep-running` waits for before it reads the store of a running collector."""

from __future__ import annotations

import time
from typing import Any

from moetrace_collectors.commands.demo import _wait_for_verdicts


class StoreThatIsStillWritten:
    """Rank steps are all there; verdicts come one look after another."""

    def __init__(self, judged: list[int]) -> None:
        self._judged = judged
        self.looks = 0

    def rows(self, query: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        """The next look."""
        assert parameters == {"run_id": "run"}
        self.looks += 1
        if "step_verdicts" not in query:
            return [{"n": 16}]
        return [{"n": self._judged[min(self.looks, len(self._judged)) - 1]}]


def test_rank_steps_without_verdicts_are_waited_for(monkeypatch: Any) -> None:
    """Batches end in any order: the rows of rank steps alone do not say that their steps are joined."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    store = StoreThatIsStillWritten([0, 0, 14, 16])
    _wait_for_verdicts(store, "run", 16)
    assert store.looks == 4


def test_rank_steps_that_are_never_judged_are_not_waited_for_without_end() -> None:
    """What came too late gets no verdict."""
    store = StoreThatIsStillWritten([14])
    _wait_for_verdicts(store, "run", 16, timeout_s=0.3)
    assert store.looks >= 1
