"""Identity without talking: every rank derives the same ids and the same sampling decision.

Pure functions of (run id, step, rank, microbatch). Never reads a clock or a random source, so no
collective is needed to agree on a trace or on which steps are sampled.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What a run id may look like: it becomes a label, a column value and part of file names."""
HIGHEST_STEP = 2**62
"""The highest step number that a rank may record and a collector takes."""


def _digest(size: int, person: bytes, *parts: bytes) -> bytes:
    # Length prefixes keep ("a", "bc") and ("ab", "c") apart.
    hasher = hashlib.blake2b(digest_size=size, person=person)
    for part in parts:
        hasher.update(len(part).to_bytes(4, "little"))
        hasher.update(part)
    return hasher.digest()


@lru_cache(maxsize=256)  # a collector asks for all ranks of a step
def trace_id(run_id: str, step: int) -> int:
    """128-bit trace id of a step, the same on every rank: blake2b-128(run id, step)."""
    digest = _digest(16, b"moetrace.trace", run_id.encode(), step.to_bytes(8, "little"))
    # OpenTelemetry forbids the all-zero id.
    return int.from_bytes(digest, "big") or 1


def span_id(trace: int, rank: int, microbatch: int) -> int:
    """64-bit span id of one rank's step: blake2b-64(trace id, rank, microbatch)."""
    digest = _digest(
        8,
        b"moetrace.span",
        trace.to_bytes(16, "big"),
        rank.to_bytes(4, "little"),
        microbatch.to_bytes(4, "little"),
    )
    return int.from_bytes(digest, "big") or 1


def phase_span_id(
    parent: int, layer: int, phase: int, direction: int, microbatch: int, ordinal: int, *, barrier: bool
) -> int:
    """64-bit span id of a phase row that is a span of its own; phase and direction are wire codes."""
    fields = (layer, phase, direction, microbatch, ordinal, int(barrier))
    digest = _digest(
        8,
        b"moetrace.phase",
        parent.to_bytes(8, "big"),
        b"".join(field.to_bytes(4, "little", signed=True) for field in fields),
    )
    return int.from_bytes(digest, "big") or 1


def placement_span_id(trace: int, version: int, rank: int) -> int:
    """64-bit span id of a placement that one rank announces: blake2b-64(trace id, version, rank)."""
    digest = _digest(
        8,
        b"moetrace.place",
        trace.to_bytes(16, "big"),
        version.to_bytes(4, "little"),
        rank.to_bytes(4, "little"),
    )
    return int.from_bytes(digest, "big") or 1


def is_sampled(run_id: str, step: int, period: int) -> bool:
    """Whether `step` is one of the 1-in-`period` sampled steps; all ranks decide alike.

    hash(run id, step) mod period == 0. A period of 1 samples every step, 0 samples none.
    """
    if period <= 1:
        return period == 1
    digest = _digest(8, b"moetrace.sample", run_id.encode(), step.to_bytes(8, "little"))
    return int.from_bytes(digest, "little") % period == 0
