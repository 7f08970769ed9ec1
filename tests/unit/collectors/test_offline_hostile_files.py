"""Files that damage or malice has been at: one printable line, and no memory beyond what they are worth."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.placement_file import read_placement
from moetrace_collectors.offline.load_dumps import read_load_dumps
from moetrace_collectors.offline.nsys import read_nsys
from moetrace_collectors.offline.source import bad_file


def test_an_error_that_quotes_a_file_is_one_printable_line(tmp_path: Path) -> None:
    """Names of columns with line ends and escape sequences do not reach the terminal as such."""
    path = tmp_path / "load.csv"
    path.write_text('step,layer,expert,"o\x1b[2J\nunt"\n0,0,0,1\n')
    with pytest.raises(UsageError) as error:
        read_load_dumps(path)
    assert str(error.value).isprintable()
    assert len(str(bad_file(path, "x", "y" * 10**6))) < 3_000


def test_a_damaged_name_in_a_database_is_not_a_traceback(tmp_path: Path) -> None:
    """SQLite quotes it in its own message, which is then no text."""
    path = tmp_path / "report.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        connection.commit()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"StringIds (id INTEGER", b"Stri\xffIds (i\xff INTEGER"))
    with pytest.raises(UsageError) as error:
        read_nsys(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ranks", [0, -1, 2**31, 2**62, 10**40])
def test_a_placement_of_absurd_many_ranks_is_refused(tmp_path: Path, ranks: int) -> None:
    """Before memory is taken for them."""
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"expert_ranks": [0, 0, 1, 1], "ranks": ranks}))
    with pytest.raises(UsageError, match="1 to 65536 expected"):
        read_placement(path, num_experts=4, num_ranks=None)
