"""A store that refuses its tables: a collector's start, `moetrace migrate`, and who writes a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Never

import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from moetrace_collectors import pipeline
from moetrace_collectors.cli import main
from moetrace_collectors.commands import migrate

REFUSED = "Code: 243. DB::Exception: Cannot reserve 1.00 MiB, not enough space. (NOT_ENOUGH_SPACE)"


class FullDisk:
    """A store's client; the store has no room."""

    def command(self, *_: Any, **__: Any) -> Never:
        """Refuse."""
        raise DatabaseError(REFUSED)

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("module", "command"),
    [(pipeline, ["collect", "--http-port", "0", "--no-grpc"]), (migrate, ["migrate"])],
    ids=["collect", "migrate"],
)
def test_a_full_disk_is_one_line_and_the_directory_is_free_again(
    module: Any,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The line names the store and what it says; exit 2, and the next start finds no owner."""
    monkeypatch.setattr(module, "open_client", lambda *_: FullDisk())
    for _ in range(2):
        assert main([*command, "--dir", str(tmp_path)]) == 2
        err = capfd.readouterr().err
        assert err == f"moetrace: chdb://{tmp_path}/store refused a migration: {REFUSED}\n"
