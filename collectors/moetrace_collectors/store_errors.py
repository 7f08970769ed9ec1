"""What a store's error means: whether the same again may work, and what to tell people."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from moetrace_collectors.errors import UsageError
from moetrace_collectors.store import first_line

RETRYABLE_CODES = frozenset({159, 202, 209, 210, 241, 242, 243, 252, 319, 425, 999})
"""ClickHouse errors that pass: timeout, too many queries, network, memory, read-only replica, disk space,
too many parts, unknown status of insert, system error, Keeper."""
_CODE = re.compile(r"\bCode: (\d+)\.")


def code_in(text: str) -> int | None:
    """The number that ClickHouse gives an error, out of its text."""
    found = _CODE.search(text)
    return int(found[1]) if found else None


def is_retryable(error: Exception) -> bool:
    """Whether the store may take the very same rows later."""
    from clickhouse_connect.driver import exceptions

    if isinstance(error, (OSError, MemoryError)):
        return True
    final = (exceptions.DataError, exceptions.ProgrammingError, exceptions.NotSupportedError)
    if not isinstance(error, exceptions.ClickHouseError) or isinstance(error, final):
        return False
    # Without a number the store has not answered at all.
    code = getattr(error, "code", None)
    return not code or code in RETRYABLE_CODES


@contextmanager
def store_answers() -> Iterator[None]:
    """A block that asks a store: what goes wrong there is one line for the user.

    Raises:
        UsageError: the store does not answer, or refuses.
    """
    from clickhouse_connect.driver.exceptions import ClickHouseError

    try:
        yield
    except (ClickHouseError, OSError) as error:
        raise UsageError(f"the store does not answer: {first_line(error)}") from error


@contextmanager
def store_takes_migrations(store: str) -> Iterator[None]:
    """A block that makes or updates the tables of a store, named as people know it.

    Raises:
        UsageError: the store refuses, as for want of disk space or of rights, or does not answer.
    """
    from clickhouse_connect.driver.exceptions import ClickHouseError

    try:
        yield
    except (ClickHouseError, OSError) as error:
        raise UsageError(f"{store} refused a migration: {first_line(error)}") from error
