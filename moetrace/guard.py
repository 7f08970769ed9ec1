"""The one place that swallows our own failures.

The model must never see them: each is counted per stage, logged once per stage, and a stage that
keeps failing is switched off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec

logger = logging.getLogger("moetrace")
P = ParamSpec("P")

FAILURES_BEFORE_OFF = 20
"""A stage that failed this often is off for the rest of the run; the count says so in the metrics."""


class Guard:
    """Counts and swallows failures by stage."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self._off: set[str] = set()

    def is_off(self, stage: str) -> bool:
        """Whether the stage was switched off."""
        return stage in self._off

    def caught(self, stage: str, error: BaseException) -> None:
        """Record a failure that a caller has just caught."""
        count = self.errors.get(stage, 0) + 1
        self.errors[stage] = count
        if count == 1:
            logger.warning(
                "moetrace: stage %s failed (%s: %s); the model is not affected; counted from here on",
                stage,
                type(error).__name__,
                error,
            )
        if count == FAILURES_BEFORE_OFF:
            self._off.add(stage)
            logger.warning("moetrace: stage %s failed %d times and is now off", stage, count)

    def run(self, stage: str, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Call `function`; a failure is counted, never raised. Does nothing once the stage is off.

        Returns:
            Whether `function` ran to its end.
        """
        if stage in self._off:
            return False
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - this is what the guard is for
            self.caught(stage, error)
            return False
        return True
