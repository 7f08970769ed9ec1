"""A run directory: what lies in it, who owns its store, and where the newest one is.

::

    moetrace-runs/<name>/
        store/               embedded ClickHouse data
        wal/                 requests that are acknowledged and not yet stored
        collector.json       while a collector owns the store: its pid and HTTP address
        dead_letter.jsonl    what could not be decoded
        report.html          the last report of the run that the directory is named after
        report-<run>.html    of another run in its store

The embedded engine gives a path to one process at a time. While a collector lives, everyone else
reads through its HTTP address; `collector.json` (written by `owner`) is how they find it. This module
only finds and names; opening a store is `store`, reading rows for people is `views.store_rows`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moetrace_collectors.errors import UsageError
from moetrace_collectors.store import embedded_dsn

RUNS_DIRECTORY = Path("moetrace-runs")
"""Where commands put and look for run directories, relative to the working directory."""
STORE_NAME = "store"
OWNER_NAME = "collector.json"
WAL_NAME = "wal"
DEAD_LETTER_NAME = "dead_letter.jsonl"
REPORT_NAME = "report"
MOST_LISTED = 5
"""Folders that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOwner:
    """The collector that has the store open."""

    pid: int
    http_address: str
    """Base address of its HTTP endpoints, as in http://127.0.0.1:4318."""

    def is_alive(self) -> bool:
        """Whether a process with this id exists (on this machine)."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """One run directory by its path; the files need not exist."""

    path: Path

    @property
    def store_path(self) -> Path:
        """Folder of the embedded store."""
        return self.path / STORE_NAME

    @property
    def owner_path(self) -> Path:
        """File that names the collector which owns the store."""
        return self.path / OWNER_NAME

    @property
    def wal_path(self) -> Path:
        """Folder of the write-ahead log."""
        return self.path / WAL_NAME

    @property
    def dead_letter_path(self) -> Path:
        """File of what could not be decoded."""
        return self.path / DEAD_LETTER_NAME

    def report_path(self, run_id: str) -> Path:
        """Where a run's report goes unless told otherwise: no run of a store overwrites another's."""
        return self.path / (
            f"{REPORT_NAME}.html" if run_id == self.path.resolve().name else report_name(run_id)
        )

    @property
    def dsn(self) -> str:
        """Address of the embedded store for clickhouse-connect."""
        return embedded_dsn(self.store_path)

    def live_owner(self) -> StoreOwner | None:
        """The collector that owns the store now; None where there is none, or it has died.

        Raises:
            UsageError: the file is there and cannot be read as one.
        """
        try:
            text = self.owner_path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"cannot read {self.owner_path}: {error.strerror}") from error
        try:
            fields = json.loads(text)
            owner = StoreOwner(pid=int(fields["pid"]), http_address=str(fields["http_address"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.owner_path} is not a collector's note (pid and http_address expected): "
                "delete it if no collector runs on this directory"
            ) from error
        return owner if owner.is_alive() else None


def report_name(run_id: str) -> str:
    """A file name for a run's report, whatever the run is called."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", run_id)[:100]
    if plain != run_id:
        # Two runs that look the same now are still told apart.
        plain += "-" + hashlib.blake2b(run_id.encode(), digest_size=4).hexdigest()
    return f"{REPORT_NAME}-{plain}.html"


def open_run_directory(path: Path) -> RunDirectory:
    """The run directory at `path`.

    Raises:
        UsageError: no such directory, or it holds no store.
    """
    directory = RunDirectory(path=path)
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a directory: give a run directory with --dir, as written by moetrace demo"
        )
    if not directory.store_path.is_dir():
        below = runs_below(path)
        if below:
            raise UsageError(
                f"{path} holds {listed(below)} and no {STORE_NAME}/ itself: give one of them, as in --dir "
                f"{below[-1]}"
            )
        raise UsageError(f"{path} holds no {STORE_NAME}/: give a run directory with --dir")
    return directory


def runs_below(path: Path) -> list[Path]:
    """Run directories directly in a folder; none where it cannot be read."""
    try:
        return sorted(entry for entry in path.iterdir() if (entry / STORE_NAME).is_dir())
    except OSError:
        return []


def listed(paths: Sequence[Path]) -> str:
    """Names of folders, for a sentence."""
    more = f" and {len(paths) - MOST_LISTED} more" if len(paths) > MOST_LISTED else ""
    return ", ".join(f"{path.name}/" for path in paths[:MOST_LISTED]) + more


def newest_run_directory(parent: Path = RUNS_DIRECTORY) -> RunDirectory:
    """The run directory under `parent` whose store was created last.

    Raises:
        UsageError: there is none.
    """
    candidates = [path for path in sorted(parent.glob("*")) if (path / STORE_NAME).is_dir()]
    if not candidates:
        raise UsageError(
            f"no run directory under {parent}/: run moetrace demo first, or give one with --dir, "
            "a store with --dsn, or a running collector with --url"
        )
    return RunDirectory(path=max(candidates, key=lambda path: _created(path / STORE_NAME)))


def _created(store: Path) -> float:
    # Every opening, a reader's too, changes the time of the folder itself; its oldest entry dates
    # from the day the store was made.
    return min((entry.stat().st_mtime for entry in store.iterdir()), default=store.stat().st_mtime)
