"""One collector owns a run directory and its store, and a second one is told who."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from moetrace_collectors import owner
from moetrace_collectors.errors import UsageError
from moetrace_collectors.owner import OwnerNote
from moetrace_collectors.run_directory import RunDirectory
from moetrace_collectors.store import embedded_dsn, parse_store

NOTE = OwnerNote(
    pid=os.getpid(),
    http_address="http://127.0.0.1:4318",
    grpc_address="127.0.0.1:4317",
    store_dsn="chdb:///x/store",
    database="moetrace",
)


def test_the_note_says_where_the_owner_listens(tmp_path: Path) -> None:
    """collector.json is what others find the collector by."""
    directory = tmp_path / "run"
    ownership = owner.acquire(directory, parse_store(embedded_dsn(directory / "store")))
    ownership.write_note(NOTE.with_runs(["a", "b"]))
    assert json.loads((directory / "collector.json").read_text()) == {
        "pid": os.getpid(),
        "http_address": "http://127.0.0.1:4318",
        "grpc_address": "127.0.0.1:4317",
        "store_dsn": "chdb:///x/store",
        "database": "moetrace",
        "run_ids": ["a", "b"],
    }
    live = RunDirectory(path=directory).live_owner()
    assert live is not None
    assert live.http_address == NOTE.http_address
    ownership.release()
    assert not (directory / "collector.json").exists()


def test_runs_that_come_before_it_is_ready_do_not_say_that_it_is(tmp_path: Path) -> None:
    """A log that is replayed brings runs at once; readers take the note for an address that answers."""
    ownership = owner.acquire(tmp_path, parse_store(embedded_dsn(tmp_path / "store")))
    ownership.note_runs(["early"])
    assert not (tmp_path / "collector.json").exists()
    ownership.write_note(NOTE)
    assert json.loads((tmp_path / "collector.json").read_text())["run_ids"] == ["early"]
    ownership.note_runs(["early", "late"])
    assert json.loads((tmp_path / "collector.json").read_text())["run_ids"] == ["early", "late"]
    ownership.release()


def test_two_threads_may_write_the_note(tmp_path: Path) -> None:
    """New runs while the collector says that it is ready: neither takes the other's file away."""
    ownership = owner.acquire(tmp_path, parse_store(embedded_dsn(tmp_path / "store")))
    ownership.write_note(NOTE)
    failures: list[OSError] = []

    def write(run_id: str) -> None:
        try:
            for _ in range(300):
                ownership.note_runs([run_id])
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(run_id,)) for run_id in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert json.loads((tmp_path / "collector.json").read_text())["run_ids"][0] in "abcd"
    ownership.release()


def test_a_second_owner_is_told_who_and_how_to_query(tmp_path: Path) -> None:
    """One line names pid, address and the command to read the store."""
    store = parse_store(embedded_dsn(tmp_path / "store"))
    ownership = owner.acquire(tmp_path, store)
    ownership.write_note(NOTE)
    with pytest.raises(UsageError) as error:
        owner.acquire(tmp_path, store)
    assert str(error.value) == (
        f"{tmp_path} is owned by the collector with pid {os.getpid()} at http://127.0.0.1:4318: "
        f"query it with moetrace query --dir {tmp_path} '...', stop it, or give this one another --dir"
    )
    ownership.release()
    owner.acquire(tmp_path, store).release()


def test_a_store_shared_by_two_directories_has_one_owner(tmp_path: Path) -> None:
    """The embedded path itself is owned, wherever the run directories lie."""
    store = parse_store(embedded_dsn(tmp_path / "shared" / "store"))
    ownership = owner.acquire(tmp_path / "one", store)
    ownership.write_note(NOTE)
    with pytest.raises(UsageError, match=rf"moetrace query --dir {tmp_path}/one "):
        owner.acquire(tmp_path / "two", store)
    ownership.release()


def test_a_crashed_owner_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    """A note without a lock is stale: it is removed, and does not look like the new one being ready."""
    (tmp_path / "collector.json").write_text("{}")
    ownership = owner.acquire(tmp_path, parse_store(embedded_dsn(tmp_path / "store")))
    assert not (tmp_path / "collector.json").exists()
    ownership.release()


def test_a_path_that_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    """A run directory that cannot be made is a usage error with the fix."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match=r"cannot write to .*file.*; give another directory with --dir"):
        owner.acquire(file, parse_store(embedded_dsn(file / "store")))
