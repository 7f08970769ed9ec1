"""Appends frames to segment files, makes them durable in groups, reads them back, deletes what is stored.

::

    wal/00000000000000000007.wal   closed; deleted once all that it holds is stored
    wal/00000000000000000008.wal   open; appended to

    append  append  append              every request of the group waits in `commit`
       \\______|______/
            one fdatasync               made by whoever of them came first

A position is durable once `commit` has returned. The bytes that `append` has written before an error are
taken back, so a disk that was full and has room again is used again without a restart.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moetrace_collectors.errors import CollectorError
from moetrace_collectors.wal.frames import (
    SEGMENT_HEADER_BYTES,
    Damage,
    Frame,
    FrameKind,
    frame_header,
    scan,
    segment_header,
)

SUFFIX = ".wal"


class WalUnavailableError(CollectorError):
    """The disk did not take it; nothing of it counts as written."""


class WalFullError(CollectorError):
    """The log holds as much as it may; it empties once the store takes rows again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A frame's place; comes back from `append`."""

    segment: int
    offset: int
    end: int


@dataclass(slots=True, kw_only=True)
class _OpenSegment:
    number: int
    fd: int
    size: int
    synced: int = 0
    is_broken: bool = False
    """A write could not be taken back, or a sync failed: nothing more goes here."""


class WriteAheadLog:
    """Segments of one directory; safe from any thread. The caller owns the directory (`owner`)."""

    def __init__(
        self,
        directory: Path,
        *,
        epoch: int,
        next_segment: int,
        sizes: dict[int, int],
        max_bytes: int,
        segment_bytes: int,
        write: Callable[[int, bytes], int] = os.write,
        sync: Callable[[int], None] = os.fdatasync,
    ) -> None:
        """Take over a directory after `recover`, which gives the first four arguments.

        Args:
            directory: exists and can be written.
            epoch: names this process in the segments that it writes.
            next_segment: number of the first new segment.
            sizes: segments that are there, by number, with their bytes.
            max_bytes: of all segments together; beyond it `append` raises WalFullError.
            segment_bytes: size at which a new segment is begun.
            write: os.write; tests put a disk that is full in.
            sync: os.fdatasync; tests count and break it.
        """
        self.directory = self._directory = directory
        self._epoch = epoch
        self._next_segment = next_segment
        self._sizes = dict(sizes)
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._write = write
        self._sync = sync
        self._condition = threading.Condition()
        self._open: _OpenSegment | None = None
        self._broken: set[int] = set()
        """Segments that were left without a sync that worked."""
        self._is_syncing = False
        self.num_syncs = 0
        """Syncs so far: what the group commit saves is requests minus this."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        with self._condition:
            return sum(self._sizes.values())

    @property
    def oldest_segment(self) -> int:
        """The oldest segment that is there, or the next one to be written."""
        with self._condition:
            return min(self._sizes, default=self._next_segment)

    def append(self, kind: FrameKind, payload: bytes, *, arrived_ns: int, is_small: bool = False) -> Position:
        """Write one frame; durable after `commit`.

        Args:
            kind: what the payload is.
            payload: the bytes.
            arrived_ns: monotonic; never smaller than in an earlier call.
            is_small: our own bookkeeping, which must not be kept out by the requests that fill the log.

        Raises:
            WalFullError: no room within `max_bytes`.
            WalUnavailableError: the disk refused.
        """
        frame = frame_header(kind, payload, arrived_ns=arrived_ns) + payload
        with self._condition:
            if not is_small and self.num_bytes + len(frame) > self._max_bytes:
                raise WalFullError(f"the write-ahead log holds {self.num_bytes} of {self._max_bytes} bytes")
            segment = self._segment_for(len(frame))
            offset = segment.size
            self._write_all(segment, frame)
            return Position(segment=segment.number, offset=offset, end=segment.size)

    def commit(self, position: Position) -> None:
        """Return once the frame at `position` is durable, together with all that was written before it.

        Raises:
            WalUnavailableError: the disk failed; the frame may or may not be found again.
        """
        with self._condition:
            while True:
                segment = self._open
                if segment is None or segment.number != position.segment:
                    # A segment is left only in order: synced, or broken and then never to be trusted.
                    if position.segment in self._broken:
                        raise WalUnavailableError("the disk did not make the request durable")
                    return
                if segment.synced >= position.end:
                    return
                if segment.is_broken:
                    raise WalUnavailableError("the disk did not make the request durable")
                if self._is_syncing:
                    self._condition.wait()
                    continue
                self._sync_group(segment)

    def release(self, before: int) -> None:
        """Delete the segments with a smaller number; never the one that is written to.

        Raises:
            OSError: the directory refused; it is tried again at the next call.
        """
        with self._condition:
            numbers = [n for n in sorted(self._sizes) if n < before]
            if self._open is not None:
                numbers = [number for number in numbers if number != self._open.number]
        for number in numbers:
            self._path(number).unlink(missing_ok=True)
            with self._condition:
                self._sizes.pop(number, None)
                self._broken.discard(number)

    def read(self, position: Position | None = None) -> Iterator[tuple[int, Frame]]:
        """Segment and frame from a position (from the oldest without one) on.

        Ends where nothing more is written; what is appended while it is read is given too.
        """
        number = self.oldest_segment if position is None else position.segment
        offset = SEGMENT_HEADER_BYTES if position is None else position.offset
        while True:
            with self._condition:
                size = self._sizes.get(number, 0)
            if size > offset:
                with self._path(number).open("rb") as file:
                    for frame in scan(file, start=offset, end=size, damage=Damage()):
                        offset = frame.end
                        yield number, frame
            with self._condition:
                if self._sizes.get(number, 0) > size:
                    continue
                later = [other for other in self._sizes if other > number]
            if not later:
                return
            number, offset = min(later), SEGMENT_HEADER_BYTES

    def roll(self) -> None:
        """Make the next frame begin a new segment, so that the present one can be deleted."""
        with self._condition:
            self._leave()

    def close(self) -> None:
        """Make everything durable and let the file go; harmless twice."""
        with self._condition:
            self._leave()

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:020d}{SUFFIX}"

    def _segment_for(self, num_bytes: int) -> _OpenSegment:
        segment = self._open
        if segment is not None:
            is_full = segment.size + num_bytes > self._segment_bytes and segment.size > SEGMENT_HEADER_BYTES
            if is_full or segment.is_broken:
                self._leave()
        return self._open or self._begin()

    def _begin(self) -> _OpenSegment:
        number = self._next_segment
        path = self._path(number)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise _unavailable(error) from error
        segment = _OpenSegment(number=number, fd=fd, size=0)
        try:
            self._write_all(segment, segment_header(epoch=self._epoch, sequence=number))
            _sync_directory(self._directory)
        except (OSError, WalUnavailableError) as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            self._sizes.pop(number, None)
            raise _unavailable(error) from error
        self._next_segment = number + 1
        self._open = segment
        return segment

    def _write_all(self, segment: _OpenSegment, data: bytes) -> None:
        start = segment.size
        view = memoryview(data)
        written = 0
        try:
            while written < len(data):
                written += self._write(segment.fd, view[written:])  # type: ignore[arg-type]
        except OSError as error:
            try:
                os.ftruncate(segment.fd, start)
                os.lseek(segment.fd, start, os.SEEK_SET)
            except OSError:
                segment.is_broken = True
            raise _unavailable(error) from error
        segment.size = start + len(data)
        self._sizes[segment.number] = segment.size

    def _sync_group(self, segment: _OpenSegment) -> None:
        """Sync for everyone who has written; called with the lock, which is dropped meanwhile."""
        end = segment.size
        self._is_syncing = True
        self._condition.release()
        error: OSError | None = None
        try:
            self._sync(segment.fd)
        except OSError as failed:
            error = failed
        finally:
            self._condition.acquire()
            self._is_syncing = False
            self.num_syncs += 1
            if error is None:
                segment.synced = max(segment.synced, end)
            else:
                # After a failed sync the kernel may have dropped the pages: a second try would lie.
                segment.is_broken = True
            self._condition.notify_all()

    def _leave(self) -> None:
        """Close the open segment, synced; with the lock held."""
        while self._is_syncing:
            self._condition.wait()
        segment, self._open = self._open, None
        if segment is None:
            return
        if not segment.is_broken and segment.synced < segment.size:
            try:
                self._sync(segment.fd)
                self.num_syncs += 1
            except OSError:
                segment.is_broken = True
        if segment.is_broken:
            self._broken.add(segment.number)
        os.close(segment.fd)
        self._condition.notify_all()


def _unavailable(error: Exception) -> WalUnavailableError:
    if isinstance(error, WalUnavailableError):
        return error
    text = getattr(error, "strerror", None) or str(error)
    return WalUnavailableError(f"the disk of the write-ahead log does not take it: {text}")


def _sync_directory(directory: Path) -> None:
    # A new file's name is durable only with its directory.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
