"""The bytes of a segment: a header, then frames, each with its length and CRC. Pure; no file is opened here.

::

    segment  magic 4s | version u16 | 0 u16 | epoch u64 | sequence u64 | crc u32
    frame    length u32 | crc u32 | kind u8 | 0 x 3 | arrived_ns i64 | payload

A frame's CRC covers everything behind it. Whatever a crash or a disk did to a segment, `scan` gives every
frame whose bytes are whole: it steps over a damaged frame by its length, and gives up the rest of the
segment only where the length itself leads nowhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import IO

from moetrace_collectors.deflate import crc32

MAGIC = b"MoeW"
VERSION = 1
_SEGMENT = struct.Struct("<4sHHQQ")
_FRAME = struct.Struct("<IIB3xq")
_CRC = struct.Struct("<I")
SEGMENT_HEADER_BYTES = _SEGMENT.size + _CRC.size
FRAME_HEADER_BYTES = _FRAME.size
_CRC_FROM = 8
"""A frame's CRC starts behind length and CRC; a wrong length then fails on the payload it cuts out."""


class FrameKind(IntEnum):
    """What a frame's payload is. Never renumbered: old segments are read by new collectors."""

    REQUEST = 1
    """An ExportTraceServiceRequest in protobuf."""
    REQUEST_GZIP = 2
    """The same, in gzip as it was sent."""
    CLOSED = 3
    """Closed steps whose results are stored (`closed_memory`); the payload is JSON."""


REQUESTS = (FrameKind.REQUEST, FrameKind.REQUEST_GZIP)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """First bytes of a segment."""

    epoch: int
    """The process that wrote it: `arrived_ns` of two segments compare only where their epochs are equal."""
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One whole frame."""

    kind: int
    """A FrameKind; kinds of a newer collector are passed over."""
    arrived_ns: int
    """Monotonic time of the writing process."""
    payload: bytes
    offset: int
    """Where the frame starts in its segment."""
    end: int


@dataclass(slots=True, kw_only=True)
class Damage:
    """What `scan` could not read of one segment; filled while it runs."""

    num_places: int = 0
    num_bytes: int = 0
    first_reason: str = ""
    last_end: int = -1

    def add(self, offset: int, num_bytes: int, reason: str) -> None:
        """Count damaged bytes; those right behind other ones are the same place."""
        self.num_places += offset != self.last_end
        self.num_bytes += num_bytes
        self.first_reason = self.first_reason or reason
        self.last_end = offset + num_bytes


def segment_header(*, epoch: int, sequence: int) -> bytes:
    """The bytes a segment begins with."""
    head = _SEGMENT.pack(MAGIC, VERSION, 0, epoch, sequence)
    return head + _CRC.pack(crc32(head))


def read_segment_header(data: bytes) -> SegmentHeader | None:
    """The header in the first bytes of a segment; None where they are none."""
    if len(data) < SEGMENT_HEADER_BYTES:
        return None
    magic, version, _, epoch, sequence = _SEGMENT.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _SEGMENT.size)
    if magic != MAGIC or version != VERSION or crc != crc32(data[: _SEGMENT.size]):
        return None
    return SegmentHeader(epoch=epoch, sequence=sequence)


def frame_header(kind: FrameKind, payload: bytes, *, arrived_ns: int) -> bytes:
    """The bytes in front of a payload."""
    rest = _FRAME.pack(0, 0, kind, arrived_ns)[_CRC_FROM:]
    return _FRAME.pack(len(payload), crc32(payload, crc32(rest)), kind, arrived_ns)


def scan(file: IO[bytes], *, start: int, end: int, damage: Damage) -> Iterator[Frame]:
    """Every whole frame between two offsets of a segment, in order; one frame in memory at a time.

    Args:
        file: the segment, open for reading; where it stands does not matter.
        start: offset of a frame, `SEGMENT_HEADER_BYTES` for the first.
        end: offset behind the last byte to look at.
        damage: told of everything that is passed over.
    """
    offset = start
    while offset < end:
        left = end - offset
        file.seek(offset)
        head = file.read(min(FRAME_HEADER_BYTES, left))
        if len(head) < FRAME_HEADER_BYTES:
            damage.add(offset, left, f"cut short at byte {offset}")
            return
        length, crc, kind, arrived_ns = _FRAME.unpack(head)
        if length > left - FRAME_HEADER_BYTES:
            damage.add(offset, left, f"no whole frame at byte {offset}")
            return
        payload = file.read(length)
        next_offset = offset + FRAME_HEADER_BYTES + length
        if len(payload) == length and crc32(payload, crc32(head[_CRC_FROM:])) == crc:
            yield Frame(kind=kind, arrived_ns=arrived_ns, payload=payload, offset=offset, end=next_offset)
        else:
            damage.add(offset, next_offset - offset, f"wrong CRC at byte {offset}")
        offset = next_offset
