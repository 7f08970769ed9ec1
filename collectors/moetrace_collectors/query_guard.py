"""Which SQL the read endpoint of the embedded store runs: one reading statement that names no file.

`readonly=1` of the engine refuses writes, DDL and most table functions, but not all that an
in-process engine can do (tried on ClickHouse 26.9): `SELECT file('/etc/passwd')` reads any file of
this process, `SELECT 1 INTO OUTFILE '/x'` writes one, `DESCRIBE url(...)` opens connections and
`KILL QUERY` ends the collector's own inserts. So statements are split into tokens here as the engine's
lexer does it, and whatever this lexer cannot tell for sure is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from moetrace_collectors.errors import CollectorError

READING_STATEMENTS = frozenset({"select", "with", "show", "describe", "desc", "explain", "exists"})
REFUSED_NAMES = frozenset({"file", "outfile", "infile", "eval", "catboostevaluate", "python", "stack_trace"})
"""Words that reach outside the store, as a keyword or as a function; compared in lower case. `Python` looks
for a variable of this process before the engine refuses it, `system.stack_trace` interrupts every thread."""

# Neither $ (heredocs) nor # (comments, in two spellings) nor non-ASCII outside strings (the engine takes
# typographic quotes for quotes) is a mark here.
_TOKEN = re.compile(
    r"""
      (?P<space>\s+)
    | (?P<comment>--[^\n]*|/\*.*?\*/)
    | (?P<string>'(?:[^'\\]|\\.|'')*')
    | (?P<quoted>"(?:[^"\\]|"")*"|`(?:[^`\\]|``)*`)
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<number>[0-9][0-9A-Za-z_]*)
    | (?P<mark>[-!%&()*+,./:;<=>?@\[\]^{|}~])
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)


class RefusedQueryError(CollectorError):
    """The endpoint does not run this statement; the message says why."""


def check_query(sql: str, parameters: Mapping[str, str]) -> None:
    """Let one reading statement pass.

    Args:
        sql: the statement, with or without a FORMAT clause and a closing semicolon.
        parameters: values of its placeholders; an Identifier placeholder can name a function.

    Raises:
        RefusedQueryError: several statements, not a reading one, or one that reaches outside the store.
    """
    tokens = list(_tokens(sql))
    while tokens and tokens[-1] == ("mark", ";"):
        tokens.pop()
    if ("mark", ";") in tokens:
        raise RefusedQueryError("one statement at a time")
    first = next((text for kind, text in tokens if (kind, text) != ("mark", "(")), "")
    if first.lower() not in READING_STATEMENTS:
        shown = first if first.isidentifier() and len(first) <= 40 else ascii(first[:40])
        raise RefusedQueryError(
            f"only reading is possible here: SELECT, SHOW, DESCRIBE, EXPLAIN or EXISTS, not {shown}"
        )
    if first.lower() in ("describe", "desc") and ("mark", "(") in tokens:
        raise RefusedQueryError("DESCRIBE takes the name of a table here")
    for kind, text in tokens:
        name = text[1:-1] if kind == "quoted" else text
        if kind in ("word", "quoted") and name.lower() in REFUSED_NAMES:
            raise RefusedQueryError(f"{name} is not available here: it reaches outside the store")
    for value in parameters.values():
        if value.lower() in REFUSED_NAMES:
            raise RefusedQueryError(f"{value} is not available here: it reaches outside the store")


def _tokens(sql: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(sql):
        match = _TOKEN.match(sql, position)
        if match is None or match.lastgroup is None:
            raise RefusedQueryError(
                f"cannot read the statement at character {position}: {sql[position : position + 20]!r}"
            )
        if match.lastgroup not in ("space", "comment"):
            yield match.lastgroup, match[0]
        position = match.end()
