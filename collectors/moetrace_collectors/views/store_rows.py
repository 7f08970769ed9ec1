"""Where rows come from: one narrow seam over the embedded store, a ClickHouse server, or a running collector.

Queries are written with ClickHouse's own placeholders, `{name:Type}`, and values travel beside the
text, never inside it.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from moetrace_collectors import owner
from moetrace_collectors.access.client import client_access, explain
from moetrace_collectors.errors import UsageError
from moetrace_collectors.run_directory import STORE_NAME, RunDirectory
from moetrace_collectors.store import escape_parameter, first_line, open_client, parse_store

DATABASE = "moetrace"
HTTP_TIMEOUT_SECONDS = 60.0

Row = Mapping[str, Any]
"""One row by column name; only `store_reader` sees it and turns it into records at once."""
Parameters = Mapping[str, int | str | list[int]]
"""Values by placeholder name; a list of integers binds to Array(UInt32)."""
STORED_ROWS = "stored_rows"
"""A parameter that no SQL names: how many rows there are of the steps that a query reads. While that
stays, so does the answer, and a store may give the one that it gave before."""


class Store(Protocol):
    """What the views need of a store."""

    @property
    def address(self) -> str:
        """Where the rows come from, for people: a path, a DSN without its password, or a URL."""

    @property
    def database(self) -> str:
        """Database that holds the tables."""

    def rows(self, sql: str, parameters: Parameters) -> list[Row]:
        """All rows of a SELECT.

        Raises:
            UsageError: the store cannot be reached or does not answer the query.
        """


class ClientStore:
    """A store through clickhouse-connect: `chdb:///path`, `clickhouse://host`, `https://host`."""

    def __init__(
        self, dsn: str, *, database: str = DATABASE, ownership: owner.Ownership | None = None
    ) -> None:
        """Open it.

        Args:
            dsn: Address of the store.
            database: Database of the tables.
            ownership: Of the run directory; released on close.

        Raises:
            UsageError: not a DSN, not reachable, no store there, or the path is owned by another process.
        """
        address = parse_store(dsn)
        if address.embedded_path is not None and not address.embedded_path.is_dir():
            # The engine would create an empty store there.
            raise UsageError(
                f"no store at {address.embedded_path}: give the store/ folder of a run directory"
            )
        self.address = address.display
        self.is_embedded = address.embedded_path is not None
        self.database = database
        self._ownership = ownership
        try:
            self._client = open_client(address)
        except UsageError as error:
            if "EmbeddedServer" not in str(error):
                raise
            # The engine says one thing for all, and prints the reason on stderr by itself.
            raise UsageError(
                f"the engine cannot open {self.address}: another program has it open (read through its "
                "collector with --url), or it is damaged or was copied without its symbolic links"
            ) from error
        from clickhouse_connect.driver.exceptions import ClickHouseError  # open_client said if it is missing

        self._error: type[Exception] = ClickHouseError

    def rows(self, sql: str, parameters: Parameters) -> list[Row]:
        """See Store."""
        try:
            result = self._client.query(sql, parameters={**parameters, "database": self.database})
        except self._error as error:
            raise UsageError(_no_answer(self.address, self.database, str(error))) from error
        return list(result.named_results())

    def close(self) -> None:
        """Give the embedded path (or the connection) back."""
        self._client.close()
        if self._ownership is not None:
            self._ownership.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HttpStore:
    """A running collector, or any ClickHouse server, through its HTTP interface; needs no driver."""

    def __init__(self, url: str, *, database: str = DATABASE) -> None:
        """Nothing is sent before the first query.

        Raises:
            UsageError: not an http or https address, or the environment names no readable token.
        """
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url {url}: a collector's address expected, as in http://127.0.0.1:4318")
        self._url = url.rstrip("/") + "/"
        self._access = client_access()
        self.address = parse_store(url).display
        self.database = database

    def rows(self, sql: str, parameters: Parameters) -> list[Row]:
        """See Store."""
        settings = {
            "default_format": "JSONEachRow",
            "output_format_json_quote_64bit_integers": "0",
            "param_database": self.database,
            **{f"param_{name}": escape_parameter(str(value)) for name, value in parameters.items()},
        }
        request = urllib.request.Request(
            f"{self._url}?{urllib.parse.urlencode(settings)}",
            data=sql.encode(),
            headers={"Content-Type": "text/plain; charset=utf-8"},
            method="POST",
        )
        try:
            body = self._access.fetch(request, timeout_s=HTTP_TIMEOUT_SECONDS)
        except UsageError:
            raise
        except urllib.error.HTTPError as error:
            if (told := explain(self.address, error)) is not None:
                raise UsageError(told) from error
            text = error.read().decode(errors="replace") or f"HTTP {error.code}"
            raise UsageError(_no_answer(self.address, self.database, text)) from error
        except (OSError, ValueError) as error:
            if (told := explain(self.address, error)) is not None:
                raise UsageError(told) from error
            reason = getattr(error, "reason", error)
            raise UsageError(f"no collector answers at {self.address} ({reason}): check --url") from error
        try:
            return [json.loads(line) for line in body.splitlines() if line.strip()]
        except ValueError as error:
            raise UsageError(f"{self.address} did not answer with JSON rows: check --url") from error

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def store_of_directory(directory: RunDirectory, *, database: str = DATABASE) -> ClientStore | HttpStore:
    """The store of a run directory: through its collector while one lives, else opened and owned here.

    Raises:
        UsageError: it cannot be opened, or another process has it open.
    """
    live = directory.live_owner()
    if live is not None:
        return HttpStore(live.http_address, database=database)
    ownership = owner.acquire(directory.path, parse_store(directory.dsn))
    try:
        return ClientStore(directory.dsn, database=database, ownership=ownership)
    except BaseException:
        ownership.release()
        raise


def store_of_dsn(dsn: str, *, database: str = DATABASE) -> ClientStore | HttpStore:
    """The store at a DSN; an embedded one as `store_of_directory` does it, so that its owner is asked.

    Raises:
        UsageError: it cannot be opened, or another process has it open.
    """
    path = parse_store(dsn).embedded_path
    if path is None:
        return ClientStore(dsn, database=database)
    if not path.is_dir():
        # The engine would create an empty store there.
        raise UsageError(f"no store at {path}: give the {STORE_NAME}/ folder of a run directory")
    if path.name != STORE_NAME:
        return ClientStore(dsn, database=database)
    return store_of_directory(RunDirectory(path=path.parent), database=database)


def _no_answer(address: str, database: str, text: str) -> str:
    if "UNKNOWN_TABLE" in text or "UNKNOWN_DATABASE" in text:
        return (
            f"{address} holds no tables of moetrace in database {database}: nothing has been stored there yet"
        )
    return f"{address} did not answer a query: {first_line(text)}"
