"""Steps on disk that the collector does not take now: bounded, in order, one file after the other.

::

    <spool_dir>/run-7-rank-00003-0000000001.jsonl    oldest, sent next, deleted once all of it is sent
    <spool_dir>/run-7-rank-00003-0000000002.jsonl    written to

The lines are those of the file emitter, so `moetrace analyze` reads what nobody ever fetches. A rank that
starts again under the same run id sends what it left; a line that was sent twice is a duplicate to the
collector. Used by the export thread and, at the end, by who closes; never by the model's thread.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.emit.jsonl import from_json, to_json
from moetrace.record.types import StepRecord
from moetrace.self_metrics import SelfMetrics
from moetrace_schemas.enums import DropReason

FILE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A record with who sent it, as it was when it was recorded."""

    record: StepRecord
    context: RankContext
    sample_period: int
    model_name: str
    model_version: str


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    num_bytes: int
    num_lines: int


class Spool:
    """One rank's files; safe from any thread."""

    def __init__(
        self,
        directory: str,
        context: RankContext,
        *,
        max_bytes: int,
        drop: Callable[[DropReason, int], None],
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """Make the directory, and find what an earlier process of this rank and run left.

        Raises:
            OSError: it cannot be made or read.
        """
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._stem = f"{context.run_id}-rank-{context.rank:05d}-"
        self._max_bytes = max_bytes
        self._file_bytes = min(file_bytes, max(1, max_bytes // 4))
        self._drop = drop
        self._lock = threading.Lock()
        self._files: deque[_File] = deque()
        self._num_sent = 0
        """Lines of the oldest file that are sent."""
        self._next_number = 1
        self._may_append = False
        for path in sorted(self._directory.glob(f"{self._stem}*.jsonl")):
            lines = path.read_bytes().count(b"\n")
            self._files.append(_File(path, path.stat().st_size, lines))
            self._next_number = int(path.stem.rpartition("-")[2]) + 1

    def __len__(self) -> int:
        """Steps that wait."""
        with self._lock:
            return sum(file.num_lines for file in self._files) - self._num_sent

    def append(self, sent: Sequence[Sent]) -> None:
        """Keep records behind all others; what the disk does not take is dropped and counted."""
        with self._lock:
            for one in sent:
                line = json.dumps(_to_line(one), separators=(",", ":")).encode() + b"\n"
                try:
                    self._write(line)
                except OSError:
                    self._may_append = False
                    self._drop(DropReason.SPOOL_FAILED, 1)
            self._make_room()

    def oldest(self, count: int) -> list[Sent]:
        """The oldest records, at most so many; they stay until `sent`."""
        with self._lock:
            while self._files:
                file = self._files[0]
                found, num_bad = self._read(file, count)
                if num_bad:
                    # Lines that nobody can read would block what is behind them.
                    self._drop(DropReason.SPOOL_FAILED, num_bad)
                    self._num_sent += num_bad
                if found:
                    return found
                self._forget_oldest()
            return []

    def sent(self, count: int) -> None:
        """So many of the oldest are with the collector."""
        with self._lock:
            self._num_sent += count
            if self._files and self._num_sent >= self._files[0].num_lines:
                self._forget_oldest()

    def _write(self, line: bytes) -> None:
        if not self._may_append or self._files[-1].num_bytes + len(line) > self._file_bytes:
            path = self._directory / f"{self._stem}{self._next_number:010d}.jsonl"
            # A disk that takes the name and not the line gets the same name again, and not one for each line.
            with path.open("wb") as stream:
                stream.write(line)
            self._next_number += 1
            self._files.append(_File(path, len(line), 1))
            self._may_append = True
            return
        file = self._files[-1]
        with file.path.open("ab") as stream:
            stream.write(line)
        self._files[-1] = replace(file, num_bytes=file.num_bytes + len(line), num_lines=file.num_lines + 1)

    def _make_room(self) -> None:
        while len(self._files) > 1 and sum(file.num_bytes for file in self._files) > self._max_bytes:
            self._drop(DropReason.SPOOL_FULL, max(0, self._files[0].num_lines - self._num_sent))
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        file = self._files.popleft()
        self._num_sent = 0
        self._may_append = self._may_append and bool(self._files)
        # What cannot be deleted is sent again by who comes next, as duplicates.
        with contextlib.suppress(OSError):
            file.path.unlink()

    def _read(self, file: _File, count: int) -> tuple[list[Sent], int]:
        """Records behind those that are sent, and how many unreadable lines stand in front of the first."""
        found: list[Sent] = []
        num_bad = 0
        try:
            with file.path.open("rb") as stream:
                for number, line in enumerate(stream):
                    if number < self._num_sent or number >= file.num_lines:
                        continue
                    try:
                        found.append(_from_line(json.loads(line)))
                    except (KeyError, TypeError, ValueError):
                        if found:
                            break
                        num_bad += 1
                    if len(found) == count:
                        break
        except OSError:
            return [], file.num_lines - self._num_sent
        return found, num_bad


def open_spool(config: Config, context: RankContext, metrics: SelfMetrics) -> Spool | None:
    """The spool that a configuration asks for; None where it asks for none.

    Raises:
        OSError: its directory cannot be made or read.
    """
    if not config.spool_dir:
        return None
    spool = Spool(config.spool_dir, context, max_bytes=config.spool_max_bytes, drop=metrics.drop)
    metrics.spooled_steps = len(spool)
    return spool


def _to_line(sent: Sent) -> dict[str, Any]:
    return {
        **to_json(sent.record, sent.context),
        "host_name": sent.context.host_name,
        "sample_period": sent.sample_period,
        "model_name": sent.model_name,
        "model_version": sent.model_version,
        "anchor_error_ns": sent.record.anchor_error_ns,
        "expected_sites": sorted(sent.record.expected_sites),
        "seen_sites": sorted(sent.record.seen_sites),
    }


def _from_line(data: dict[str, Any]) -> Sent:
    return Sent(
        record=replace(
            from_json(data),
            anchor_error_ns=data["anchor_error_ns"],
            expected_sites=frozenset(data["expected_sites"]),
            seen_sites=frozenset(data["seen_sites"]),
        ),
        context=RankContext(
            run_id=data["run_id"],
            rank=data["rank"],
            world_size=data["world_size"],
            ep_rank=data["ep_rank"],
            ep_size=data["ep_size"],
            ep_group=data["ep_group"],
            host_name=data["host_name"],
        ),
        sample_period=data["sample_period"],
        model_name=data["model_name"],
        model_version=data["model_version"],
    )
