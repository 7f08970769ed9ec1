"""Arrow tables into the embedded engine without leaving the process. Part of the ClickHouse sink.

A client writes an Arrow table to a file that the engine then reads and parses. The engine can as well read
the columns where they lie, which takes a quarter off an insert.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class EmbeddedInsert:
    """A connection of its own to the engine of this process; used by one thread at a time."""

    def __init__(self, path: Path, *, database: str, settings: Mapping[str, int]) -> None:
        """Connect.

        Args:
            path: folder of the engine, which is open or free to be opened.
            database: holds the tables.
            settings: of every insert.
        """
        import chdb

        self._connection = chdb.connect(str(path))
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
        from clickhouse_connect.driver.exceptions import DatabaseError, ProgrammingError

        columns = ", ".join(f"`{name}`" for name in arrow.column_names)
        # Python(name) finds the variable of that name in the frames that call it.
        moetrace_rows = arrow  # noqa: F841 - read by the engine
        try:
            self._connection.query(
                f"INSERT INTO `{self._database}`.`{table}` ({columns}) "
                f"SELECT {columns} FROM Python(moetrace_rows) SETTINGS {self._settings}"
            )
        except RuntimeError as error:
            # chdb has two classes of one name; the one that it raises here is a RuntimeError.
            code = code_in(str(error))
            if code is None:
                raise ProgrammingError(str(error)) from error
            raise DatabaseError(str(error), code=code) from error

    def close(self) -> None:
        """Give the connection back."""
        self._connection.close()
