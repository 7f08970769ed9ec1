"""What can go wrong before tracing starts. Once `instrument` has returned, nothing of ours is raised.

::

    MoetraceError
    +-- ConfigError(ValueError)          an argument or environment variable is wrong
    +-- UnsupportedModelError(ValueError) instrument(..., strict=True) found no MoE layer
    +-- NotInitializedError(RuntimeError) a call that needs moetrace.init() first
"""

from __future__ import annotations

import operator


class MoetraceError(Exception):
    """Base of this package's errors."""


class ConfigError(MoetraceError, ValueError):
    """A setting is wrong; the message names the setting, its value and what is allowed."""


def check_whole(name: str, value: object) -> int:
    """The whole number that a value is, numpy's as Python's: nothing else has a place in JSON or a span.

    Raises:
        ConfigError: names it.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name}={value!r}: a whole number expected") from None


class UnsupportedModelError(MoetraceError, ValueError):
    """No MoE layer was found; the message says what was looked for."""


class NotInitializedError(MoetraceError, RuntimeError):
    """Called before `moetrace.init()` or after `moetrace.shutdown()`."""
