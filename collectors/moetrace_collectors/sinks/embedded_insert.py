"""Arrow tables into the embedded engine without leaving the process. Part of the ClickHouse sink.

A client writes an Arrow table to a file that the engine then reads and parses. The engine can as well read
the columns where they lie, which takes a quarter off an insert.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moetrace_collectors.sinks.clickhouse import INSERT_SETTINGS
from moetrace_collectors.store_errors import code_in

EMBEDDED_SETTINGS = {
    **INSERT_SETTINGS,
    # One thread reads the whole: more of them wait for the interpreter before each piece.
    "max_threads": 1,
    "max_block_size": 1_048_576,
}
"""Settings of an insert that reads Python objects."""
SPLIT_ROWS = 50_000
"""Rows of half a table from which on halves are worth a part each."""


class EmbeddedInsert:
    """Connections of its own to the engine of this process; used by one thread at a time.

    A large table goes in as two halves at once: most of an insert is sorting and compressing by one thread.
    """

    def __init__(self, path: Path, *, database: str, settings: Mapping[str, int]) -> None:
        """Connect.

        Args:
            path: folder of the engine, which is open or free to be opened.
            database: holds the tables.
            settings: of every insert.
        """
        import chdb

        self._connections = [chdb.connect(str(path)) for _ in range(2)]
        self._second = ThreadPoolExecutor(1, thread_name_prefix="moetrace-insert")
        self._database = database
        self._settings = ", ".join(f"{name} = {value:d}" for name, value in settings.items())

    def __call__(self, table: str, arrow: Any) -> None:
        """Insert.

        Args:
            table: a table of the migrations.
            arrow: pyarrow.Table whose columns are named as the table's.

        Raises:
            clickhouse_connect.driver.exceptions.DatabaseError: as the client does; one that is final where
                the engine gives no number, since it is in this process and cannot be away.
        """
        half = arrow.num_rows // 2
        if half < SPLIT_ROWS:
            self._insert(0, table, arrow)
            return
        second = self._second.submit(self._insert, 1, table, arrow.slice(half))
        try:
            self._insert(0, table, arrow.slice(0, half))
        finally:
            # What it raises comes out here; where both fail, the first stays as the context of the second.
            second.result()

    def close(self) -> None:
        """Give the connections back."""
        self._second.shutdown()
        for connection in self._connections:
            connection.close()

    def _insert(self, number: int, table: str, arrow: Any) -> None:
        from clickhouse_connect.driver.exceptions import DatabaseError, ProgrammingError

        columns = ", ".join(f"`{name}`" for name in arrow.column_names)
        # Python(name) finds the variable of that name in the frames that call it.
        moetrace_rows = arrow  # noqa: F841 - read by the engine
        try:
            self._connections[number].query(
                f"INSERT INTO `{self._database}`.`{table}` ({columns}) "
                f"SELECT {columns} FROM Python(moetrace_rows) SETTINGS {self._settings}"
            )
        except RuntimeError as error:
            # chdb has two classes of one name; the one that it raises here is a RuntimeError.
            code = code_in(str(error))
            if code is None:
                raise ProgrammingError(str(error)) from error
            raise DatabaseError(str(error), code=code) from error
