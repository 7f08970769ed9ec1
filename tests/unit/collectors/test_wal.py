"""The write-ahead log: groups share a sync, a damaged tail costs only itself, a full disk is used again."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors.wal import (
    FrameKind,
    Position,
    WalFullError,
    WalUnavailableError,
    WriteAheadLog,
    recover,
)
from moetrace_collectors.wal.frames import FRAME_HEADER_BYTES, SEGMENT_HEADER_BYTES

MIB = 2**20


@dataclass
class Disk:
    """A disk with so many bytes of room, and a sync that waits or fails when told."""

    room: int = 10**9
    fail_sync: bool = False
    gate: threading.Event | None = None
    entered: threading.Event = field(default_factory=threading.Event)

    def write(self, fd: int, data: bytes) -> int:
        """Write what fits; ENOSPC where nothing does."""
        part = data[: self.room]
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(part)
        return os.write(fd, part)

    def sync(self, fd: int) -> None:
        """Wait for the gate, then fail or return."""
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.fail_sync:
            raise OSError(errno.EIO, "Input/output error")
        os.fdatasync(fd)


def open_log(
    directory: Path,
    *,
    disk: Disk | None = None,
    epoch: int = 1,
    max_bytes: int = MIB,
    segment_bytes: int = MIB,
) -> WriteAheadLog:
    """Recover a directory and go on with its log."""
    recovery, disk = recover(directory, now_ns=0), disk or Disk()
    return WriteAheadLog(
        directory,
        epoch=epoch,
        next_segment=recovery.next_segment,
        sizes=recovery.sizes,
        max_bytes=max_bytes,
        segment_bytes=segment_bytes,
        write=disk.write,
        sync=disk.sync,
    )


def append(log: WriteAheadLog, payload: bytes, *, arrived_ns: int = 0) -> Position:
    """Append a request."""
    return log.append(FrameKind.REQUEST, payload, arrived_ns=arrived_ns)


def payloads(directory: Path, log: WriteAheadLog | None = None) -> list[bytes]:
    """What a log gives back; by default a new one on the directory."""
    return [frame.payload for _, frame in (log or open_log(directory)).read()]


def test_what_was_committed_is_read_back_in_order_by_the_next_process(tmp_path: Path) -> None:
    """Frames over several segments come back as they were written, without the log having been closed."""
    log = open_log(tmp_path, segment_bytes=100)
    wanted = [bytes([number]) * 40 for number in range(9)]
    for payload in wanted:
        log.commit(append(log, payload))
    assert len(list(tmp_path.glob("*.wal"))) == 9
    assert payloads(tmp_path) == wanted
    assert payloads(tmp_path, log) == wanted


def test_many_requests_share_one_sync(tmp_path: Path) -> None:
    """While one sync runs, everyone who writes waits for the next one, and that is one for all of them."""
    disk = Disk(gate=threading.Event())
    log = open_log(tmp_path, disk=disk)
    first = threading.Thread(target=lambda: log.commit(append(log, b"first")))
    first.start()
    assert disk.entered.wait(10)
    positions = [append(log, b"later") for _ in range(20)]
    waiters = [threading.Thread(target=log.commit, args=(position,)) for position in positions]
    for waiter in waiters:
        waiter.start()
    assert disk.gate is not None
    disk.gate.set()
    for thread in (first, *waiters):
        thread.join(10)
        assert not thread.is_alive()
    assert log.num_syncs == 2


def test_a_commit_waits_for_the_sync(tmp_path: Path) -> None:
    """Nobody is told that his bytes are durable before the disk has said so."""
    disk = Disk(gate=threading.Event())
    log = open_log(tmp_path, disk=disk)
    committed = threading.Event()

    def commit() -> None:
        log.commit(append(log, b"x"))
        committed.set()

    thread = threading.Thread(target=commit)
    thread.start()
    assert disk.entered.wait(10)
    assert not committed.is_set()
    assert disk.gate is not None
    disk.gate.set()
    thread.join(10)
    assert committed.is_set()


def test_a_full_disk_takes_nothing_and_is_used_again_once_it_has_room(tmp_path: Path) -> None:
    """Half of a frame is taken back, what was there stays, and no restart is needed."""
    disk = Disk()
    log = open_log(tmp_path, disk=disk)
    log.commit(append(log, b"before"))
    disk.room = FRAME_HEADER_BYTES + 3
    with pytest.raises(WalUnavailableError, match="No space left on device"):
        append(log, b"does not fit")
    disk.room = 10**6
    log.commit(append(log, b"after"))
    assert payloads(tmp_path) == [b"before", b"after"]
    assert recover(tmp_path, now_ns=0).num_damaged_bytes == 0


def test_a_disk_that_is_full_from_the_start_leaves_no_empty_segments(tmp_path: Path) -> None:
    """Not even a segment's header fits: the file goes away again, and the next attempt works."""
    disk = Disk(room=5)
    log = open_log(tmp_path, disk=disk)
    with pytest.raises(WalUnavailableError):
        append(log, b"x")
    assert list(tmp_path.iterdir()) == []
    disk.room = 10**6
    log.commit(append(log, b"y"))
    assert payloads(tmp_path) == [b"y"]


def test_a_sync_that_fails_acknowledges_nobody_and_the_next_segment_works(tmp_path: Path) -> None:
    """A failed sync is never tried again on the same file: it could succeed without the bytes."""
    disk = Disk(fail_sync=True)
    log = open_log(tmp_path, disk=disk)
    position = append(log, b"one")
    with pytest.raises(WalUnavailableError):
        log.commit(position)
    disk.fail_sync = False
    with pytest.raises(WalUnavailableError):
        log.commit(position)
    after = append(log, b"two")
    log.commit(after)
    assert after.segment > position.segment
    with pytest.raises(WalUnavailableError):
        log.commit(position)


def test_the_log_is_bounded_and_our_own_bookkeeping_still_passes(tmp_path: Path) -> None:
    """Requests beyond the bound are refused; the note that lets the log shrink is not."""
    log = open_log(tmp_path, max_bytes=200)
    append(log, b"x" * 100)
    with pytest.raises(WalFullError):
        append(log, b"x" * 100)
    log.append(FrameKind.CLOSED, b"y" * 100, arrived_ns=0, is_small=True)


def test_released_segments_are_deleted_and_the_open_one_is_not(tmp_path: Path) -> None:
    """Disk space comes back as soon as a segment is stored; what is written to stays."""
    log = open_log(tmp_path, segment_bytes=100)
    positions = [append(log, b"x" * 60) for _ in range(4)]
    log.release(positions[2].segment)
    assert log.oldest_segment == positions[2].segment
    log.release(10**6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{positions[3].segment:020d}.wal"]
    assert log.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_new_process_begins_a_new_segment(tmp_path: Path) -> None:
    """Nothing is ever appended behind a tail that a crash may have left."""
    first = append(open_log(tmp_path), b"one")
    second = append(open_log(tmp_path), b"two")
    assert second.segment == first.segment + 1
    assert payloads(tmp_path) == [b"one", b"two"]


def test_reading_goes_on_into_what_is_appended_meanwhile(tmp_path: Path) -> None:
    """A reader that is behind a writer sees everything, across segments."""
    log = open_log(tmp_path, segment_bytes=120)
    append(log, b"0" * 40)
    seen = []
    for number, (_, frame) in enumerate(log.read(), start=1):
        seen.append(frame.payload[:1])
        if number < 5:
            append(log, str(number).encode() * 40)
    assert seen == [b"0", b"1", b"2", b"3", b"4"]


def test_an_empty_file_of_a_crash_is_nothing(tmp_path: Path) -> None:
    """A crash between making a file and its first byte is no damage."""
    (tmp_path / f"{7:020d}.wal").touch()
    recovery = recover(tmp_path, now_ns=0)
    assert (recovery.num_damaged_bytes, recovery.next_segment, recovery.sizes) == (0, 8, {})


def test_a_file_that_is_no_segment_is_put_aside(tmp_path: Path) -> None:
    """Garbage under a segment's name is counted, kept under another name, and does not stop the start."""
    (tmp_path / f"{7:020d}.wal").write_bytes(b"no segment" * 10)
    recovery = recover(tmp_path, now_ns=0)
    assert (recovery.num_damaged_bytes, recovery.num_damaged_places) == (100, 1)
    assert recovery.detail == f"{7:020d}.wal: no segment header"
    assert [path.suffix for path in tmp_path.iterdir()] == [".damaged"]
    assert recover(tmp_path, now_ns=0).num_damaged_bytes == 0


def test_arrival_times_of_earlier_processes_end_now(tmp_path: Path) -> None:
    """Inside one process gaps are kept, between processes there are none; the last arrival is now."""
    log = open_log(tmp_path, epoch=1, segment_bytes=100)
    for arrived_ns in (500, 510, 540):
        append(log, b"x" * 60, arrived_ns=arrived_ns)
    log = open_log(tmp_path, epoch=2)
    for arrived_ns in (2, 9):
        append(log, b"x", arrived_ns=arrived_ns)
    recovery = recover(tmp_path, now_ns=1_000)
    times = [
        frame.arrived_ns + recovery.clock_offsets_ns[segment] for segment, frame in open_log(tmp_path).read()
    ]
    assert times == [953, 963, 993, 993, 1_000]


# --- property: damage ----------------------------------------------------------------------------

PAYLOADS = st.lists(st.binary(max_size=50), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(written=PAYLOADS, cut=st.integers(0, 2_000))
def test_a_truncated_tail_costs_only_what_was_cut(written: list[bytes], cut: int) -> None:
    """Cut anywhere: every whole frame before the cut is kept, the rest of the bytes is counted."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        log = open_log(directory)
        ends = [append(log, payload).end for payload in written]
        log.close()
        (path,) = directory.iterdir()
        cut = min(cut, path.stat().st_size)
        os.truncate(path, cut)
        recovery = recover(directory, now_ns=0)
        whole = sum(end <= cut for end in ends)
        assert recovery.num_requests == whole
        assert payloads(directory) == written[:whole]
        kept = max((end for end in ends if end <= cut), default=SEGMENT_HEADER_BYTES)
        if cut >= SEGMENT_HEADER_BYTES:
            assert recovery.num_damaged_bytes == cut - kept
        else:
            assert recovery.num_damaged_bytes == cut


@settings(max_examples=300, deadline=None)
@given(written=PAYLOADS, where=st.integers(0, 10**6), garbage=st.binary(min_size=1, max_size=40))
def test_corruption_costs_only_the_frames_it_hit(written: list[bytes], where: int, garbage: bytes) -> None:
    """Overwrite anywhere behind the header: all before it is kept, nothing false is read, the start works.

    Kept and damaged bytes add up to the file, so that nothing is passed over in silence.
    """
    with TemporaryDirectory() as name:
        directory = Path(name)
        log = open_log(directory)
        ends = [append(log, payload).end for payload in written]
        log.close()
        (path,) = directory.iterdir()
        data = bytearray(path.read_bytes())
        start = SEGMENT_HEADER_BYTES + where % (len(data) - SEGMENT_HEADER_BYTES)
        end = min(len(data), start + len(garbage))
        data[start:end] = garbage[: end - start]
        path.write_bytes(data)
        recovery = recover(directory, now_ns=0)
        read = payloads(directory)
        before = sum(frame_end <= start for frame_end in ends)
        assert read[:before] == written[:before]
        remaining = iter(written)
        assert all(any(payload == candidate for candidate in remaining) for payload in read)
        kept = sum(FRAME_HEADER_BYTES + len(payload) for payload in read)
        assert SEGMENT_HEADER_BYTES + kept + recovery.num_damaged_bytes == len(data)
        # And the log goes on behind it.
        log = open_log(directory)
        log.commit(append(log, b"after"))
        assert payloads(directory) == [*read, b"after"]
