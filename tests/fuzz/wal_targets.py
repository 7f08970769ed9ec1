"""Segments of the write-ahead log as a crash or a disk may leave them."""

from __future__ import annotations

import importlib
import importlib.util
import io
from typing import Any

MODULE = "moetrace_collectors.wal.frames"


def has_log() -> bool:
    """Whether this collector has a write-ahead log."""
    return importlib.util.find_spec("moetrace_collectors.wal") is not None


class WalTarget:
    """The bytes of one segment: each is part of a whole frame or counted as damaged, and none is both."""

    name = "write-ahead log segment"
    documents: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self._frames = frames = importlib.import_module(MODULE)
        segment = frames.segment_header(epoch=7, sequence=3)
        for number, payload in enumerate((b"", b"one", b"x" * 300)):
            kind = frames.FrameKind.REQUEST
            segment += frames.frame_header(kind, payload, arrived_ns=number) + payload
        self.seeds = [segment, segment[:-7]]

    def run(self, data: bytes) -> str:
        """One segment."""
        frames = self._frames
        if frames.read_segment_header(data) is None:
            return "no segment"
        start = frames.SEGMENT_HEADER_BYTES
        damage = frames.Damage()
        whole = list(frames.scan(io.BytesIO(data), start=start, end=len(data), damage=damage))
        covered = sum(frame.end - frame.offset for frame in whole) + damage.num_bytes
        if covered != len(data) - start:
            raise AssertionError(f"{covered} bytes accounted for, {len(data) - start} are there")
        return f"damaged, {len(whole)} whole" if damage.num_places else "ok"
