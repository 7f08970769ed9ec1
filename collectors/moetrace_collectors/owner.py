"""One collector owns a run directory and its store: the lock that says so, and the note that says who.

The lock is the truth (the system drops it when the process ends, however it ends); `collector.json` is
for people, for `moetrace query` and for whoever waits until the collector is ready.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from moetrace_collectors.errors import UsageError
from moetrace_collectors.run_directory import RunDirectory
from moetrace_collectors.store import StoreAddress

LOCK_NAME = "collector.lock"
MAX_NOTED_RUNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerNote:
    """What collector.json says; a superset of run_directory.StoreOwner."""

    pid: int
    http_address: str
    grpc_address: str
    """Empty where gRPC is off."""
    store_dsn: str
    """Without its password."""
    database: str
    run_ids: tuple[str, ...] = ()
    """Runs seen since the start, the newest last; at most MAX_NOTED_RUNS."""

    def with_runs(self, run_ids: Sequence[str]) -> OwnerNote:
        """The same note with these runs."""
        return replace(self, run_ids=tuple(run_ids)[-MAX_NOTED_RUNS:])


class Ownership:
    """Holds the lock until released."""

    def __init__(self, directory: Path, locks: Sequence[IO[str]]) -> None:
        self._run = RunDirectory(path=directory)
        self._locks = list(locks)
        self._writing = threading.Lock()
        """Two threads write: who says that the collector is ready, and who sees new runs."""
        self._note: OwnerNote | None = None
        self._run_ids: tuple[str, ...] = ()
        """Seen before it was ready: the write-ahead log may bring runs at once."""

    def write_note(self, note: OwnerNote) -> None:
        """Say in collector.json that the collector is ready, with the runs noted so far.

        Raises:
            OSError: the disk does not take it.
        """
        with self._writing:
            self._note = note.with_runs(self._run_ids or note.run_ids)
            self._write(self._note)

    def note_runs(self, run_ids: Sequence[str]) -> None:
        """Note these runs, in collector.json too once the collector is ready; any thread.

        Raises:
            OSError: the disk does not take it.
        """
        with self._writing:
            if self._note is None:
                self._run_ids = tuple(run_ids)
            else:
                self._note = self._note.with_runs(run_ids)
                self._write(self._note)

    def _write(self, note: OwnerNote) -> None:
        """Replace the file in one step, so that no reader sees half of it."""
        path = self._run.owner_path
        temporary = path.with_name(path.name + ".new")
        fields = {
            "pid": note.pid,
            "http_address": note.http_address,
            "grpc_address": note.grpc_address,
            "store_dsn": note.store_dsn,
            "database": note.database,
            "run_ids": list(note.run_ids),
        }
        temporary.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    def release(self) -> None:
        """Take the note away and drop the lock."""
        self._run.owner_path.unlink(missing_ok=True)
        for lock in self._locks:
            lock.close()
        self._locks.clear()


def acquire(directory: Path, store: StoreAddress) -> Ownership:
    """Own a run directory and its store, making the directory where it is missing.

    Raises:
        UsageError: another process owns it, or the directory cannot be written.
    """
    folders = [directory]
    if store.embedded_path is not None and store.embedded_path.parent.resolve() != directory.resolve():
        # The engine's path is what only one process may open, wherever the run directory lies.
        folders.append(store.embedded_path.parent)
    locks: list[IO[str]] = []
    try:
        for folder in folders:
            locks.append(_lock(folder, directory))
    except BaseException:
        for lock in locks:
            lock.close()
        raise
    # A note that a crashed collector left behind must not look like ours being ready.
    RunDirectory(path=directory).owner_path.unlink(missing_ok=True)
    return Ownership(directory, locks)


def _lock(folder: Path, directory: Path) -> IO[str]:
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not truncated before the lock is held: the owner's line is in it.
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}; give another directory with --dir"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner_directory = file.read().strip() or str(folder)
        file.close()
        raise UsageError(_owned(folder, Path(owner_directory))) from error
    file.seek(0)
    file.truncate()
    file.write(f"{directory.resolve()}\n")
    file.flush()
    return file


def _owned(folder: Path, directory: Path) -> str:
    try:
        owner = RunDirectory(path=directory).live_owner()
    except UsageError:
        owner = None
    if owner is None:
        return f"{folder} is in use by another process that is starting, stopping or querying it: try again"
    return (
        f"{folder} is owned by the collector with pid {owner.pid} at {owner.http_address}: query it with "
        f"moetrace query --dir {directory} '...', stop it, or give this one another --dir"
    )
