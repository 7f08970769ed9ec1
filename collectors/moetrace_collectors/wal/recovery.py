"""What a directory of segments holds when a collector starts: whole frames, damage, and when they came.

Never a reason not to start: what cannot be read is counted, reported and left behind. Reads every byte
once, so that the first replayed request is not taken for the last before the log is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moetrace_collectors.wal.frames import (
    REQUESTS,
    SEGMENT_HEADER_BYTES,
    Damage,
    FrameKind,
    read_segment_header,
    scan,
)
from moetrace_collectors.wal.log import SUFFIX

DAMAGED_SUFFIX = ".damaged"
"""A segment without a readable header is put aside under this name: its bytes may still help a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What was found."""

    sizes: dict[int, int]
    """Segments by number, with their bytes."""
    next_segment: int
    num_requests: int
    """Requests that can be read, stored already or not."""
    closed: tuple[bytes, ...]
    """Payloads of the CLOSED frames, in order."""
    clock_offsets_ns: dict[int, int]
    """Per segment: what makes its `arrived_ns` a time of this process, the last of all being now."""
    num_damaged_places: int
    num_damaged_bytes: int
    detail: str
    """Where the damage of the first damaged segments begins; empty where there is none."""


def recover(directory: Path, *, now_ns: int) -> Recovery:
    """Look through a directory, making it where it is missing.

    Args:
        directory: of the segments.
        now_ns: monotonic time of this process.

    Raises:
        OSError: the directory cannot be made or read.
    """
    directory.mkdir(parents=True, exist_ok=True)
    numbers = sorted(int(path.stem) for path in directory.glob(f"*{SUFFIX}") if path.stem.isdigit())
    damages: dict[str, Damage] = {}
    sizes: dict[int, int] = {}
    closed: list[bytes] = []
    spans: dict[int, _Span] = {}
    num_requests = 0
    for number in numbers:
        path = directory / f"{number:020d}{SUFFIX}"
        size = path.stat().st_size
        damage = Damage()
        with path.open("rb") as file:
            header = read_segment_header(file.read(SEGMENT_HEADER_BYTES))
            if header is None:
                if size:
                    damage.add(0, size, "no segment header")
                    damages[path.name] = damage
                    path.replace(path.with_name(path.name + DAMAGED_SUFFIX))
                else:
                    # A crash between making the file and writing its first bytes: nothing is lost.
                    path.unlink()
                continue
            sizes[number] = size
            span = spans[number] = _Span(epoch=header.epoch)
            for frame in scan(file, start=SEGMENT_HEADER_BYTES, end=size, damage=damage):
                span.see(frame.arrived_ns)
                if frame.kind in REQUESTS:
                    num_requests += 1
                elif frame.kind == FrameKind.CLOSED:
                    closed.append(frame.payload)
        if damage.num_places:
            damages[path.name] = damage
    return Recovery(
        sizes=sizes,
        next_segment=max(numbers, default=0) + 1,
        num_requests=num_requests,
        closed=tuple(closed),
        clock_offsets_ns=_clock_offsets(spans, now_ns),
        num_damaged_places=sum(damage.num_places for damage in damages.values()),
        num_damaged_bytes=sum(damage.num_bytes for damage in damages.values()),
        detail="; ".join(f"{name}: {damage.first_reason}" for name, damage in list(damages.items())[:3]),
    )


@dataclass(slots=True, kw_only=True)
class _Span:
    epoch: int
    first_ns: int | None = None
    last_ns: int = 0

    def see(self, arrived_ns: int) -> None:
        if self.first_ns is None:
            self.first_ns = arrived_ns
        self.last_ns = arrived_ns


def _clock_offsets(spans: dict[int, _Span], now_ns: int) -> dict[int, int]:
    """Backwards from now: gaps inside one process are kept, those between two processes are taken as none.

    ::

        process 1   |seg 1|  |seg 2|              its clock: 500 s .. 540 s
        process 2                     |seg 3|     its clock:   2 s ..   9 s
        becomes     |seg 1|  |seg 2||seg 3|now
    """
    offsets: dict[int, int] = {}
    end_ns = now_ns
    later: _Span | None = None
    for number in sorted(spans, reverse=True):
        span = spans[number]
        if later is not None and later.epoch == span.epoch and later.first_ns is not None:
            end_ns -= max(0, later.first_ns - span.last_ns)
        offsets[number] = end_ns - span.last_ns
        if span.first_ns is not None:
            end_ns -= max(0, span.last_ns - span.first_ns)
            later = span
    return offsets
