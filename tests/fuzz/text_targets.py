"""Texts: SQL before the guard, token files, configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fuzz.scratch import scratch_folder
from moetrace_collectors.access.tokens import parse_tokens
from moetrace_collectors.config import load_config
from moetrace_collectors.errors import UsageError
from moetrace_collectors.query_guard import RefusedQueryError, check_query

SQL = (
    b"SELECT step, rank, worth_ns FROM step_verdicts ORDER BY worth_ns DESC LIMIT 5",
    b"WITH a AS (SELECT 1 AS x) SELECT x FROM a FORMAT JSONEachRow;",
    b"SELECT 'it''s', \"quoted\", `name`, 1e3, [1,2], {a:UInt8}, x -> x FROM t -- c\n WHERE a != 1 /* b */",
    b"EXPLAIN SELECT count() FROM phase_spans WHERE run_id = 'x\\'y'",
    b"DESCRIBE phase_spans",
    b"SHOW TABLES",
    b"SELECT file('/etc/passwd')",
    b"SELECT 1 INTO OUTFILE '/x'",
)
TOKENS = b"# name scopes token\nranks ingest " + b"i" * 32 + b"\npeople read,ingest " + b"r" * 40 + b"\n"
CONFIG = Path(__file__).parents[2] / "collectors" / "collector.example.toml"
SECRETS = ("i" * 32, "r" * 40)


class GuardTarget:
    """The guard of SQL. What it lets pass holds none of the words that reach outside the store."""

    name = "query guard"
    seeds = SQL
    documents: tuple[Any, ...] = ()

    def run(self, data: bytes) -> str:
        """One statement, with one parameter."""
        sql, _, parameter = data.decode("utf-8", "replace").partition("\x01")
        try:
            check_query(sql, {"a": parameter})
        except RefusedQueryError as error:
            if "\n" in str(error):
                raise AssertionError("an error of more than one line") from error
            return "refused"
        if not sql.strip().isascii() and not any(mark in sql for mark in ("'", '"', "`", "--", "/*")):
            raise AssertionError("text beyond ASCII outside strings, names and comments passed")
        return "ok"


class TokenTarget:
    """Token files. No message shows what could be a token."""

    name = "token file"
    seeds = (TOKENS,)
    documents: tuple[Any, ...] = ()

    def run(self, data: bytes) -> str:
        """One file."""
        try:
            parse_tokens(data.decode("utf-8", "replace"), source="file")
        except UsageError as error:
            if any(secret in str(error) for secret in SECRETS):
                raise AssertionError("a token is shown") from error
            return "refused"
        return "ok"


class ConfigTarget:
    """Configuration files."""

    name = "configuration file"
    seeds = (CONFIG.read_bytes(), b'host = "0.0.0.0"\ninsecure = true\nhttp_port = 1\n')
    documents: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self._path = scratch_folder() / "collector.toml"

    def run(self, data: bytes) -> str:
        """One file."""
        self._path.write_bytes(data)
        try:
            load_config(self._path, {})
        except UsageError as error:
            if "\n" in str(error):
                raise AssertionError("an error of more than one line") from error
            return "refused"
        return "ok"
