"""Read-only SQL over the collector's store, with limits that the engine enforces.

Each query of the embedded store runs on its own connection of the same in-process engine (about 1 ms),
because limits and `readonly=1` are connection state: set last, they cannot be lifted again, and
nothing that a query does to its session reaches the next one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from moetrace_collectors.errors import CollectorError, UsageError
from moetrace_collectors.overdue import BusyError, EndingError, OverdueError, Places
from moetrace_collectors.query_guard import RefusedQueryError, check_query
from moetrace_collectors.store import INSTALL, StoreAddress
from moetrace_collectors.store_errors import code_in

_FORMAT = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
_PYTHON_FORMATS = ("dataframe", "arrowtable")
"""What chdb takes for a format and turns into Python objects instead of bytes."""
_NAMES_FORMAT = re.compile(r"\bFORMAT\s+\w+\s*;?\s*$", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_SETTING = re.compile(
    r"output_format_[a-z0-9_]{1,64}|date_time_output_format|session_timezone|join_use_nulls|final"
)
"""Settings a reader may choose: they change how a result looks, not what a query may use."""
_HARMLESS = (
    ("readonly", "1"),
    ("readonly", "2"),
    ("result_overflow_mode", "throw"),
    ("timeout_overflow_mode", "throw"),
    ("distributed_product_mode", "global"),
    ("distributed_foreground_insert", "1"),
    ("parallel_distributed_insert_select", "0"),
    ("async_insert", "0"),
    ("deduplicate_blocks_in_dependent_materialized_views", "1"),
)
"""Asked for by drivers, and so in any case."""
_PREFIXES = re.compile(r"(Code: \d+\. DB::Exception: )+")
_SUFFIX = re.compile(r" \(version [^()]*(?:\([^()]*\))?\)\.?")
_NAMES = re.compile(r"( \([A-Z_0-9]+\))(?:\1)+$")
_STATUS = {60: 404, 81: 404, 164: 403, 497: 403, 159: 504, 241: 507, 396: 413, 394: 503}
"""ClickHouse error code -> HTTP status: unknown table, database; readonly; time, memory, result limits;
cancelled."""


TIMEOUT_CODE = 159
OVERDUE_S = 5.0
"""For the engine to notice that a query is over its time limit, which it does between blocks of rows."""
CANCEL_S = 2.0
"""For queries to end that are cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """What one query may use."""

    timeout_s: float = 30.0
    max_memory_bytes: int = 2 * 2**30
    max_result_rows: int = 1_000_000
    max_result_bytes: int = 256 * 2**20
    max_concurrent: int = 4
    """Queries at once; one more is told to come back."""

    def settings(self, asked: Mapping[str, str]) -> dict[str, str]:
        """ClickHouse settings of one query: what was asked for, and these limits, or stricter ones.

        Raises:
            QueryError: a setting that is not a reader's to change, or a limit that is no number.
        """
        limits = {
            "max_execution_time": self.timeout_s,
            "max_memory_usage": float(self.max_memory_bytes),
            "max_result_rows": float(self.max_result_rows),
            "max_result_bytes": float(self.max_result_bytes),
            # Receiving and joining need the rest of the machine.
            "max_threads": float(max(1, (os.cpu_count() or 2) // 2)),
        }
        chosen: dict[str, str] = {}
        for name, value in asked.items():
            if name in limits:
                limits[name] = _stricter(name, value, limits[name])
            elif _SETTING.fullmatch(name) is not None:
                chosen[name] = value
            elif (name, value) not in _HARMLESS:
                raise QueryError(f"setting {name} = {value} cannot be chosen here", status=400)
        rendered = {
            name: f"{limit:.0f}" if name != "max_execution_time" else f"{limit:g}"
            for name, limit in limits.items()
        }
        return {**chosen, **rendered, "timeout_overflow_mode": "throw", "result_overflow_mode": "throw"}

    def check_size(self, body: bytes) -> bytes:
        """A result that is not too large.

        The engine counts a column of one value once, however often it is written out.

        Raises:
            QueryError: it is.
        """
        if len(body) > self.max_result_bytes:
            raise QueryError(
                f"the result has {len(body)} bytes, at most {self.max_result_bytes} may be "
                "(query_max_result_bytes)",
                status=413,
            )
        return body


class QueryError(CollectorError):
    """A query was refused or failed.

    `.status` is the HTTP status that says so, `.code` ClickHouse's number or 0.
    """

    def __init__(self, message: str, *, status: int, code: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query as it came."""

    sql: str
    format: str = "TabSeparated"
    """Output format, where the statement does not name one."""
    database: str = ""
    """Empty: the collector's own."""
    parameters: Mapping[str, str]
    """Values of {name:Type} placeholders by name, escaped as in ClickHouse's HTTP interface."""
    settings: Mapping[str, str]


class QueryRunner(Protocol):
    """Runs read-only queries; safe to call from several threads."""

    def run(self, query: Query) -> bytes:
        """The result in the query's format.

        Raises:
            QueryError: refused, failed, over a limit, or too many at once.
        """

    def cancel(self) -> None:
        """End the queries that run, as far as the engine can, and begin none any more: the process stops."""

    @property
    def num_running(self) -> int:
        """Queries that run in this process, those included that nobody waits for any more."""


class EmbeddedQueryRunner:
    """Queries of the embedded engine that this process has open."""

    def __init__(self, address: StoreAddress, *, database: str, limits: QueryLimits) -> None:
        """Take the engine's address; nothing is opened before the first query.

        Args:
            address: of an embedded store.
            database: where names without a database are looked up.
            limits: of each query.
        """
        try:
            import chdb
        except ImportError as error:
            raise UsageError(f"the embedded store needs chdb: {INSTALL}") from error
        self._connect = chdb.connect
        self._path = os.path.realpath(str(address.embedded_path))
        self._database = database
        self._limits = limits
        self._places: Places[bytes] = Places(limits.max_concurrent)

    @property
    def num_running(self) -> int:
        """See QueryRunner."""
        return self._places.num_running

    def run(self, query: Query) -> bytes:
        """See QueryRunner."""
        database = query.database or self._database
        check_name_and_guard(query, database)
        settings = self._limits.settings(query.settings)
        limit_s = float(settings["max_execution_time"])
        try:
            return self._places.call(lambda: self._run(query, database, settings), wait_s=limit_s + OVERDUE_S)
        except BusyError as error:
            raise QueryError("too many queries at once: try again", status=503) from error
        except EndingError as error:
            raise QueryError("the collector is stopping", status=503) from error
        except OverdueError as error:
            raise QueryError(
                f"the query has not ended {OVERDUE_S:g} s after its limit of {limit_s:g} s: a function over "
                "one huge array cannot be stopped. Until it ends it takes one of "
                f"{self._limits.max_concurrent} places (query_max_concurrent)",
                status=504,
                code=TIMEOUT_CODE,
            ) from error
        except RuntimeError as error:
            raise _query_error(error) from error

    def cancel(self) -> None:
        """See QueryRunner; only readers' queries are readonly, so the collector's own go on."""
        with suppress(RuntimeError):
            connection = self._connect(self._path)
            try:
                connection.query("KILL QUERY WHERE Settings['readonly'] = '1' ASYNC")
            finally:
                connection.close()
        self._places.end(wait_s=CANCEL_S)

    def _run(self, query: Query, database: str, settings: Mapping[str, str]) -> bytes:
        connection = self._connect(self._path)
        try:
            return self._ask(connection, query, database, settings)
        finally:
            connection.close()

    def _ask(self, connection: Any, query: Query, database: str, settings: Mapping[str, str]) -> bytes:
        # readonly goes last: behind it nothing can be set any more.
        settings = {**settings, "readonly": "1"}
        assignments = ", ".join(f"{name} = {_quote(value)}" for name, value in settings.items())
        connection.query(f"USE {database}")
        connection.query(f"SET {assignments}")
        result = connection.query(query.sql, query.format, params=dict(query.parameters))
        return self._limits.check_size(bytes(result.bytes() or b""))


class ServerQueryRunner:
    """Queries of a ClickHouse server, which enforces readonly and the limits itself."""

    def __init__(self, client: Any, *, database: str, limits: QueryLimits) -> None:
        """Take a clickhouse-connect client of the server."""
        from clickhouse_connect.driver.exceptions import ClickHouseError

        self._client = client
        self._error: type[Exception] = ClickHouseError
        self._database = database
        self._limits = limits

    def run(self, query: Query) -> bytes:
        """See QueryRunner."""
        database = query.database or self._database
        # A server whose profile does not let us set readonly must not be written to either.
        check_name_and_guard(query, database)
        try:
            body = self._client.raw_query(
                query.sql,
                parameters=dict(query.parameters) or None,
                settings={**self._limits.settings(query.settings), "readonly": "1", "database": database},
                fmt=None if _NAMES_FORMAT.search(query.sql) else query.format,
            )
        except self._error as error:
            raise _query_error(error) from error
        return self._limits.check_size(bytes(body))

    def cancel(self) -> None:
        """See QueryRunner: the server ends what nobody waits for by its own limits."""

    @property
    def num_running(self) -> int:
        """See QueryRunner: they run in the server."""
        return 0


def check_name_and_guard(query: Query, database: str) -> None:
    """Everything about a query that can be told before an engine sees it.

    Raises:
        QueryError: no query, a format or database that is none, or a statement that does more than read.
    """
    if not query.sql.strip():
        raise QueryError("no query: give one as ?query= or as the body", status=400)
    if _FORMAT.fullmatch(query.format) is None or query.format.lower() in _PYTHON_FORMATS:
        raise QueryError(f"format {query.format!r}: a ClickHouse format name expected", status=400)
    if _NAME.fullmatch(database) is None:
        raise QueryError(f"database {database!r}: a plain name expected", status=400)
    try:
        check_query(query.sql, query.parameters)
    except RefusedQueryError as error:
        raise QueryError(str(error), status=403) from error


def _stricter(name: str, value: str, limit: float) -> float:
    try:
        asked = float(value)
    except ValueError:
        asked = -1.0
    if not 0 <= asked < float("inf"):
        raise QueryError(f"setting {name} = {value}: a number expected", status=400)
    # 0 is ClickHouse's word for no limit.
    return min(asked, limit) if asked else limit


def _quote(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _once(text: str) -> str:
    """ClickHouse's message with its code and name once: an engine that calls another says them again."""
    start = text.find("Code: ")
    text = text[start:] if start > 0 else text
    prefix = _PREFIXES.match(text)
    if prefix is None:
        return text
    head, *more = text[prefix.end() :].split("\n", 1)
    head = _NAMES.sub(r"\1", _SUFFIX.sub("", head))
    return "\n".join([prefix[1] + head, *more])


def _query_error(error: Exception) -> QueryError:
    text = _once(str(error).strip())
    code = code_in(text) or 0
    return QueryError(text, status=_STATUS.get(code, 400 if code else 500), code=code)
