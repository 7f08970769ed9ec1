"""The write-ahead log: a request is on disk before it is acknowledged, and until all of it is stored."""

from moetrace_collectors.wal.frames import Frame, FrameKind
from moetrace_collectors.wal.log import Position, WalFullError, WalUnavailableError, WriteAheadLog
from moetrace_collectors.wal.recovery import Recovery, recover

__all__ = [
    "Frame",
    "FrameKind",
    "Position",
    "Recovery",
    "WalFullError",
    "WalUnavailableError",
    "WriteAheadLog",
    "recover",
]
