"""What a user or operator can do wrong, and what a sink can do wrong.

::

    CollectorError
    +-- UsageError(ValueError)     one line for the user, exit code 2
    +-- SinkError                  a write failed; `.retryable` says whether to try again
"""

from __future__ import annotations


class CollectorError(Exception):
    """Base of this package's errors."""


class UsageError(CollectorError, ValueError):
    """A user's mistake: the message names what, where and the fix; the command line prints it and exits 2."""


class SinkError(CollectorError):
    """A sink did not take a batch."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable
