"""Requests in the write-ahead log, as the intake and the worker use it: bytes in, arrivals out.

Sits between `wal`, which knows frames and files, and `decode`. What is written is the request as it was
sent; it is decoded again where it is read back, so a replay goes the way of a live request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from moetrace_collectors.decode import decode
from moetrace_collectors.errors import UsageError
from moetrace_collectors.intake import Arrival
from moetrace_collectors.receivers.handler import Wire
from moetrace_collectors.receivers.otlp_body import BodyError, decompress, parse_protobuf
from moetrace_collectors.receivers.wire_budget import MAX_MESSAGES
from moetrace_collectors.wal.frames import REQUESTS, FrameKind
from moetrace_collectors.wal.log import Position, WalUnavailableError, WriteAheadLog
from moetrace_collectors.wal.recovery import Recovery, recover

logger = logging.getLogger(__name__)


class Journal:
    """The log of one collector. Appending and committing from any thread, the rest from the worker's."""

    def __init__(
        self,
        log: WriteAheadLog,
        recovery: Recovery,
        *,
        max_world_size: int,
        max_decompressed_bytes: int,
    ) -> None:
        """Take the log.

        Args:
            log: made from `recovery`.
            recovery: what an earlier process left.
            max_world_size: as for `decode`.
            max_decompressed_bytes: as for the receivers.
        """
        self._log = log
        self.recovery = recovery
        self._max_world_size = max_world_size
        self._max_decompressed_bytes = max_decompressed_bytes
        self._owes_everything = False
        """Whether a note was not taken, so that the next one has to hold all closed steps."""
        self._has_warned = False

    @property
    def directory(self) -> Path:
        """Where the log lies."""
        return self._log.directory

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self._log.num_bytes

    @property
    def num_syncs(self) -> int:
        """Syncs so far."""
        return self._log.num_syncs

    def append(self, wire: Wire, *, arrived_ns: int) -> Position:
        """Write a request; durable after `commit`.

        Raises:
            WalFullError: no room.
            WalUnavailableError: the disk refused.
        """
        kind = FrameKind.REQUEST_GZIP if wire.is_gzip else FrameKind.REQUEST
        return self._log.append(kind, wire.body, arrived_ns=arrived_ns)

    def commit(self, position: Position) -> None:
        """Return once it is durable.

        Raises:
            WalUnavailableError: the disk failed.
        """
        self._log.commit(position)

    def read(self, position: Position | None) -> Iterator[Arrival]:
        """Requests from a position (None: from the oldest) on, decoded."""
        last_ns: int | None = None
        for segment, frame in self._log.read(position):
            if frame.kind not in REQUESTS:
                continue
            arrived_ns = frame.arrived_ns + self.recovery.clock_offsets_ns.get(segment, 0)
            last_ns = arrived_ns if last_ns is None else max(last_ns, arrived_ns)
            yield self._arrival(frame.payload, frame.kind == FrameKind.REQUEST_GZIP, last_ns, segment)

    def wants_everything(self, before_segment: int) -> bool:
        """Whether the next `mark_stored` needs all closed steps and not only the new ones."""
        return self._owes_everything or before_segment > self._log.oldest_segment

    def mark_stored(self, closed: bytes | None, *, before_segment: int, everything: bytes | None) -> None:
        """Note what is stored, and delete the segments that hold nothing else.

        A disk that refuses costs disk space and, after a crash, a second writing of the same rows.

        Args:
            closed: closed steps that are stored since the last call; None for none.
            before_segment: what lies in a segment before this one is stored.
            everything: all closed steps that are stored, where `wants_everything` asked for them; written
                before anything is deleted.
        """
        try:
            if everything is None:
                if closed is not None:
                    self._note(closed)
            elif before_segment > self._log.oldest_segment:
                # Holds the new ones too.
                self._shorten(before_segment, everything)
            else:
                self._note(everything)
            self._has_warned = False
        except (WalUnavailableError, OSError) as error:
            self._warn(error)

    def finish(self, everything: bytes) -> None:
        """All is stored: leave only the closed steps for the next start."""
        try:
            self._log.roll()
            position = self._log.append(FrameKind.CLOSED, everything, arrived_ns=0, is_small=True)
            self._log.commit(position)
            self._log.release(position.segment)
        except (WalUnavailableError, OSError) as error:
            self._warn(error)

    def _note(self, closed: bytes) -> Position:
        self._owes_everything = True
        position = self._log.append(FrameKind.CLOSED, closed, arrived_ns=0, is_small=True)
        self._owes_everything = False
        return position

    def _shorten(self, before_segment: int, everything: bytes) -> None:
        try:
            self._log.commit(self._note(everything))
        except WalUnavailableError:
            # A disk that the log itself has filled takes the note only once something is gone. A crash in
            # between forgets closed steps; to wait would be for ever.
            self._owes_everything = True
            self._log.release(before_segment)
            raise
        self._log.release(before_segment)

    def _warn(self, error: Exception) -> None:
        # Tried again at every turn, said once.
        if not self._has_warned:
            self._has_warned = True
            logger.warning("cannot note in the write-ahead log what is stored: %s; trying again", error)

    def close(self) -> None:
        """Give the files back."""
        self._log.close()

    def _arrival(self, body: bytes, is_gzip: bool, arrived_ns: int, segment: int) -> Arrival:
        try:
            plain = decompress(
                body, encoding="gzip" if is_gzip else "", max_bytes=self._max_decompressed_bytes
            )
            decoded = decode(
                parse_protobuf(plain, max_spans=MAX_MESSAGES), max_world_size=self._max_world_size
            )
        except BodyError as error:
            # Its CRC is right and it was decoded once: only lower limits than last time can be the reason.
            logger.warning("a request of the write-ahead log is passed over: %s", error)
            return Arrival(rank_steps=(), rejections=(), arrived_ns=arrived_ns, size_bytes=0, segment=segment)
        return Arrival(
            rank_steps=decoded.rank_steps,
            rejections=decoded.rejected,
            placements=decoded.placements,
            arrived_ns=arrived_ns,
            size_bytes=0,
            segment=segment,
        )


def open_journal(
    directory: Path,
    *,
    epoch: int,
    now_ns: int,
    max_bytes: int,
    segment_bytes: int,
    max_world_size: int,
    max_decompressed_bytes: int,
) -> Journal:
    """Recover a directory and continue its log.

    Raises:
        UsageError: the directory cannot be made, read or written.
    """
    try:
        recovery = recover(directory, now_ns=now_ns)
    except OSError as error:
        raise UsageError(
            f"cannot use {directory} for the write-ahead log: {error.strerror}; "
            "give another directory with --dir, or do without one with --wal off"
        ) from error
    log = WriteAheadLog(
        directory,
        epoch=epoch,
        next_segment=recovery.next_segment,
        sizes=recovery.sizes,
        max_bytes=max_bytes,
        segment_bytes=segment_bytes,
    )
    return Journal(
        log, recovery, max_world_size=max_world_size, max_decompressed_bytes=max_decompressed_bytes
    )
