"""Where the collector's rows live: a store's address, and opening it. Knows the embedded engine and servers.

`chdb:///absolute/path` is the ClickHouse engine inside this process; `clickhouse://`, `clickhouses://`,
`http://` and `https://` name a server. Both are driven by the same client and the same SQL.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moetrace_collectors.errors import UsageError

SERVER_SCHEMES = {"clickhouse": "http", "http": "http", "clickhouses": "https", "https": "https"}
"""DSN scheme -> interface of clickhouse-connect, which itself looks at the port only."""
SERVER_SETTINGS = {
    # On a cluster the tables are Distributed: an insert is done when the shards have it, ...
    "distributed_foreground_insert": 1,
    # ... and a query with another sharded table in its IN or JOIN sends that one's rows along.
    "distributed_product_mode": "global",
    # INSERT .. SELECT between such tables shards its rows anew; the server's own way would leave them.
    "parallel_distributed_insert_select": 0,
    # Answered once the rows are in the tables, and not in a buffer of the server; it also refuses (code 344)
    # what follows here for inserts that a user's profile makes asynchronous.
    "async_insert": 0,
    # An insert that is tried again passes over a table that has the rows, but not over the tables that are
    # filled from it: the first try may have ended between the two.
    "deduplicate_blocks_in_dependent_materialized_views": 1,
}
_TIMEOUTS = ("ConnectTimeoutError", "ReadTimeoutError", "TimeoutError")
"""Names of the HTTP library's errors, which is the driver's and not ours to import."""
INSTALL = "pip install 'moetrace[collector]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """A store's DSN, taken apart as far as the collector needs."""

    dsn: str
    interface: str
    """chdb, http or https."""
    embedded_path: Path | None
    """Folder of the embedded engine; None for a server."""

    @property
    def display(self) -> str:
        """The DSN without its password, for people and files."""
        parts = urlsplit(self.dsn)
        if parts.password is None:
            return self.dsn
        user, _, host = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user.partition(':')[0]}:***@{host}").geturl()


def parse_store(dsn: str) -> StoreAddress:
    """Read a DSN.

    Raises:
        UsageError: not a DSN that the collector knows.
    """
    expected = "chdb:///absolute/path, clickhouse://host:8123 or https://host:8443 expected"
    try:
        parts = urlsplit(dsn)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError as error:
        raise UsageError(f"store dsn {dsn!r}: {error}; {expected}") from error
    if parts.scheme == "chdb":
        if parts.netloc or not parts.path.startswith("/") or parts.path.strip("/") == "" or parts.query:
            raise UsageError(f"store dsn {dsn!r}: {expected}")
        return StoreAddress(dsn=dsn, interface="chdb", embedded_path=Path(parts.path))
    if parts.scheme not in SERVER_SCHEMES or not parts.hostname or not port_is_fine:
        raise UsageError(f"store dsn {dsn!r}: {expected}")
    return StoreAddress(dsn=dsn, interface=SERVER_SCHEMES[parts.scheme], embedded_path=None)


def embedded_dsn(path: Path) -> str:
    """DSN of the embedded engine at `path`."""
    return f"chdb://{path.resolve()}"


def open_client(address: StoreAddress) -> Any:
    """A clickhouse-connect client of the store; the caller closes it.

    Any, because the driver is optional and imported only here.

    Raises:
        UsageError: the driver is not installed, or the store cannot be opened.
    """
    try:
        import clickhouse_connect
        from clickhouse_connect.driver.exceptions import ClickHouseError
    except ImportError as error:
        raise UsageError(f"a store needs clickhouse-connect: {INSTALL}") from error
    try:
        if address.embedded_path is not None:
            try:
                import chdb  # noqa: F401 - the driver's own message does not name our extra
            except ImportError as error:
                raise UsageError(f"the embedded store needs chdb: {INSTALL}") from error
            return clickhouse_connect.get_client(interface="chdb", path=str(address.embedded_path))
        # A server's profile may forbid to change a setting; then its own value holds.
        clickhouse_connect.common.set_setting("invalid_setting_action", "drop")
        return clickhouse_connect.get_client(
            dsn=address.dsn, interface=address.interface, settings=dict(SERVER_SETTINGS)
        )
    except UsageError:
        raise
    except (ClickHouseError, ValueError, OSError) as error:
        unreachable = _why_unreachable(error) if address.embedded_path is None else ""
        if unreachable:
            raise UsageError(
                f"no ClickHouse answers at {address.display} ({unreachable}): check the host and its HTTP "
                "port (8123, or 8443 with TLS), and that the server runs"
            ) from error
        raise UsageError(f"cannot open the store {address.display}: {first_line(error)}") from error


def escape_parameter(value: str) -> str:
    """A query parameter's value as ClickHouse takes it: as an escaped field of TSV."""
    for plain, escaped in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"), ("\0", "\\0")):
        value = value.replace(plain, escaped)
    return value


def _why_unreachable(error: BaseException) -> str:
    """Why nothing answered, out of what the driver and its library wrapped it in; empty if it did answer."""
    seen: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, BaseException) or one in seen:
            continue
        seen.append(one)
        if isinstance(one, ssl.SSLError):
            # Something did answer: what it showed is the trouble, and the driver says what.
            return ""
        if isinstance(one, OSError) and one.errno is not None and one.strerror:
            return one.strerror[:1].lower() + one.strerror[1:]
        if type(one).__name__ in _TIMEOUTS:
            return "no answer in time"
        waiting += [getattr(one, "reason", None), one.__context__, one.__cause__]
    return ""


def first_line(error: Exception | str, *, limit: int = 300) -> str:
    """An error's text on one line, for people."""
    lines = str(error).strip().splitlines()
    return lines[0][:limit] if lines else "no reason given"
