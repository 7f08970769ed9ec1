"""What a reader is told where the engine refuses: its words, once."""

from __future__ import annotations

from typing import Any

import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from moetrace_collectors.read_only_query import Query, QueryError, QueryLimits, ServerQueryRunner

TWICE = (
    "Received error: Code: 73. DB::Exception: Code: 73. DB::Exception: Unknown format Nope. Maybe you meant: "
    "['One','Npy']. (UNKNOWN_FORMAT) (version 26.9.2.1). (UNKNOWN_FORMAT) (version 26.9.2.1 (official build))"
)


class Refusing:
    """A client whose server refuses every query with the same words."""

    def __init__(self, words: str) -> None:
        self._words = words

    def raw_query(self, sql: str, **_: Any) -> bytes:
        """Refuse."""
        raise DatabaseError(self._words)


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (
            TWICE,
            "Code: 73. DB::Exception: Unknown format Nope. Maybe you meant: ['One','Npy']. (UNKNOWN_FORMAT)",
            73,
        ),
        (
            "Code: 395. DB::Exception: a (b): while executing f(1). (FUNCTION_THROW_IF_VALUE_IS_NON_ZERO)",
            "Code: 395. DB::Exception: a (b): while executing f(1). (FUNCTION_THROW_IF_VALUE_IS_NON_ZERO)",
            395,
        ),
        ("connection lost (abc)", "connection lost (abc)", 0),
    ],
)
def test_a_refusal_is_told_once(words: str, message: str, code: int) -> None:
    """Engines that call engines repeat code, name and version; a reader gets one line of it."""
    runner = ServerQueryRunner(Refusing(words), database="moetrace", limits=QueryLimits())
    with pytest.raises(QueryError) as caught:
        runner.run(Query(sql="SELECT 1", parameters={}, settings={}))
    assert (str(caught.value), caught.value.code) == (message, code)
