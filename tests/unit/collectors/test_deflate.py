"""Gzip and checksums: isal, where it is installed, does what zlib does, within the same limits."""

from __future__ import annotations

import gzip
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors import deflate
from moetrace_collectors.deflate import DeflateError, crc32, unpack_member

BODY = bytes(range(256)) * 40
BOMB = gzip.compress(b"\0" * 20_000_000)


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """With one of the two libraries, whichever was chosen."""
    before = deflate.library
    deflate.library = zlib if name == "zlib" else pytest.importorskip("isal.isal_zlib")
    try:
        yield
    finally:
        deflate.library = before


@pytest.fixture(params=["zlib", "isal"])
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of the two."""
    with chosen(request.param):
        yield request.param


def test_isal_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And zlib stands in where it is not."""
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    assert deflate.fastest() is isal_zlib
    monkeypatch.setitem(sys.modules, "isal", None)
    assert deflate.fastest() is zlib


@pytest.mark.parametrize("name", ["zlib", "isal"])
@settings(deadline=None)
@given(data=st.binary(max_size=3_000), repeats=st.integers(1, 50), level=st.sampled_from([0, 1, 6, 9]))
def test_what_was_packed_comes_back(name: str, data: bytes, repeats: int, level: int) -> None:
    """Of any level, with what follows it; and sums are those of zlib, in one piece or two."""
    with chosen(name):
        member = unpack_member(gzip.compress(data * repeats, level) + b"next", max_bytes=200_000)
        assert (member.data, member.is_whole, member.rest) == (data * repeats, True, b"next")
        assert crc32(data) == zlib.crc32(data)
        assert crc32(data, crc32(b"before")) == zlib.crc32(b"before" + data)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("max_bytes", [1, 1_000, 100_000])
def test_a_bomb_is_never_larger_than_asked_for(max_bytes: int) -> None:
    """20 MB of nothing in 20 kB: as many bytes as may be, and not more memory than some of those."""
    tracemalloc.start()
    try:
        member = unpack_member(BOMB, max_bytes=max_bytes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(member.data), member.is_whole) == (max_bytes, False)
    # What was not looked at of the input is kept by either library, once or twice.
    assert peak < 3 * len(BOMB) + 3 * max_bytes + 100_000


@pytest.mark.usefixtures("library")
def test_exactly_as_many_bytes_as_may_be_are_a_whole_member() -> None:
    """The limit is not one byte too low where one more is asked for, as who checks a limit does."""
    member = unpack_member(gzip.compress(BODY), max_bytes=len(BODY) + 1)
    assert (member.data, member.is_whole, member.rest) == (BODY, True, b"")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("cut", [1, 4, 7, 8, 9, 30])
def test_what_is_cut_is_not_whole(cut: int) -> None:
    """In the data, the checksum or the length."""
    assert not unpack_member(gzip.compress(BODY)[:-cut], max_bytes=100_000).is_whole


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("place", [0, 2, -8, -4])
def test_what_is_damaged_is_refused(place: int) -> None:
    """Magic, method, checksum and length."""
    packed = bytearray(gzip.compress(BODY))
    packed[place] ^= 0x55
    with pytest.raises(DeflateError):
        unpack_member(bytes(packed), max_bytes=100_000)


@pytest.mark.parametrize("name", ["zlib", "isal"])
@settings(deadline=None, max_examples=200)
@given(place=st.integers(0, 300), value=st.integers(0, 255), cut=st.integers(0, 300))
def test_damage_anywhere_is_refused_or_changes_nothing(name: str, place: int, value: int, cut: int) -> None:
    """Whatever byte is changed and wherever it ends: an error, a member that is not whole, or what it was."""
    packed = bytearray(gzip.compress(BODY))
    packed[place % len(packed)] = value
    with chosen(name):
        try:
            member = unpack_member(bytes(packed[: len(packed) - cut]), max_bytes=100_000)
        except DeflateError:
            return
    assert not member.is_whole or member.data == BODY
