"""Unpacks gzip and sums checksums: by isal where it is installed, by zlib where it is not. Pure.

Both give the same bytes and the same sums; isal takes some two thirds of the time for the first and a tenth
for the second, and lets other threads run meanwhile, as zlib does.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

_GZIP_WINDOW = 31


class DeflateError(ValueError):
    """Bytes that are no gzip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What was unpacked of one member of a gzip stream."""

    data: bytes
    is_whole: bool
    """False where it goes on behind the bytes that were asked for, or where it is cut."""
    rest: bytes
    """What follows a whole member."""


def fastest() -> Any:
    """The library of these that is installed; Any, because one of them is optional and imported only here."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


library = fastest()


def unpack_member(packed: bytes, *, max_bytes: int) -> Member:
    """The first member of a gzip stream, never more of it than `max_bytes`.

    Raises:
        DeflateError: not gzip, or its checksum is wrong.
    """
    member = library.decompressobj(_GZIP_WINDOW)
    try:
        data = member.decompress(packed, max_bytes)
    except library.error as error:
        raise DeflateError(str(error)) from error
    return Member(data=data, is_whole=member.eof, rest=member.unused_data)


def crc32(data: bytes, value: int = 0) -> int:
    """The checksum of bytes behind those that gave `value`."""
    return int(library.crc32(data, value))
