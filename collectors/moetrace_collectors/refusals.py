"""Whether the write-ahead log's disk refuses requests: said once, and once more when it is over.

A nearly full disk takes small requests between large ones that it refuses: one that is taken ends nothing
before `CALM_NS` have passed without a refusal. Senders keep what is refused and try again later and later,
so a disk that has room again may wait long for the request that shows it: after `SILENT_NS` without a
refusal the collector counts as able again, and the next refusal is a new one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

CALM_NS = 30 * 10**9
SILENT_NS = 60 * 10**9

logger = logging.getLogger(__name__)


class DiskRefusals:
    """Safe from any thread."""

    def __init__(self, directory: Path, *, clock_ns: Callable[[], int]) -> None:
        """Begin with a disk that takes what it gets.

        Args:
            directory: of the log, for the line.
            clock_ns: monotonic.
        """
        self._directory = directory
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._last_ns: int | None = None

    @property
    def trouble(self) -> str:
        """What keeps requests from being acknowledged, in one line; empty where nothing does.

        Anyone may read it on /healthz, so it says nothing of where the log is and what the disk said.
        """
        last_ns = self._last_ns
        if last_ns is None or self._clock_ns() - last_ns >= SILENT_NS:
            return ""
        return (
            "the write-ahead log's disk refuses requests: not acknowledged; see the log of moetrace collect"
        )

    def refused(self, error: Exception) -> None:
        """The disk did not take a request."""
        with self._lock:
            now_ns = self._clock_ns()
            is_new = self._last_ns is None or now_ns - self._last_ns >= SILENT_NS
            self._last_ns = now_ns
        if is_new:
            logger.warning(
                "requests are not acknowledged: the write-ahead log in %s cannot be written: %s; senders try "
                "again until their buffers are full: make room there, or see what the disk has",
                self._directory,
                error,
            )

    def took(self) -> None:
        """The disk took a request."""
        if self._last_ns is None:
            return
        with self._lock:
            is_over = self._last_ns is not None and self._clock_ns() - self._last_ns >= CALM_NS
            if is_over:
                self._last_ns = None
        if is_over:
            logger.warning("the write-ahead log in %s can be written again", self._directory)
