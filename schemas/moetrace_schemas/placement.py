"""A placement of experts and the terms it comes with, as both sides of the wire hold them. Pure.

Slots are numbered rank by rank, as EPLB, SGLang and vLLM do::

    rank      |   0   |   1   |   2   |   3   |
    slot      | 0   1 | 2   3 | 4   5 | 6   7 |
    expert    | 5   6 | 5   7 | 0   4 | 3   1 |     expert 5 has two replicas

Digests are SHA-256 over canonical JSON: keys sorted, no blanks, ASCII, whole numbers where they are whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from moetrace_schemas.enums import CountIds
from moetrace_schemas.identity import HIGHEST_STEP

EMPTY = -1
"""A slot that holds no expert."""
MAX_VERSION = 2**31 - 1
MAX_LAYERS = 4_096
MAX_EXPERTS = 65_536
MAX_CELLS = 1_048_576
"""Slots over all layers: 256 layers x 4,096 slots."""
MAX_TEXT = 256
"""Characters of a policy version or a service name."""
MAX_WEIGHTS = 256
MAX_WEIGHT_NAME = 64
"""Characters; all digests together ride in one attribute of at most 64 KiB."""
MAX_BYTES = 2**53
MAX_SLOWDOWN = 0.10
"""Default of the most that p95 may rise, as a part of it."""
MAX_ERROR_RATE = 0.02
"""Default of the most that the error rate may rise, absolute."""
_DIGEST = re.compile(r"[0-9a-f]{8,128}")


class PlacementError(ValueError):
    """A placement or its terms are wrong; the message names the field, its value and the fix."""


def canonical_json(value: object) -> bytes:
    """The one text of a JSON value that digests are taken of.

    Raises:
        ValueError: not JSON, or a number that is not finite.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def sha256_hex(value: object) -> str:
    """SHA-256 of the canonical JSON, hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementMap:
    """Which logical expert sits in which slot of every layer; validated on construction."""

    layers: tuple[int, ...]
    """MoE layers as the model numbers its blocks, ascending."""
    physical_to_logical: tuple[tuple[int, ...], ...]
    """[layers][slots]: logical expert in each slot, -1 where it is empty."""
    num_experts: int
    """Logical experts per layer."""
    num_ranks: int
    """Expert-parallel ranks; rank r has slots r*S/R to (r+1)*S/R - 1."""

    def __post_init__(self) -> None:
        """Refuse a map that no model could run on.

        Raises:
            PlacementError: shapes do not fit, an expert is unknown, or one has no slot.
        """
        rows, layers = self.physical_to_logical, self.layers
        if not rows or len(rows) != len(layers):
            raise PlacementError(
                f"placement: {len(layers)} layer numbers for {len(rows)} layers of slots; one each expected"
            )
        if not all(0 <= number < 32_768 for number in layers) or len(rows) > MAX_LAYERS:
            raise PlacementError(f"placement layers={list(layers[:8])}: numbers 0 to 32767 expected")
        if any(lower >= upper for lower, upper in pairwise(layers)):
            raise PlacementError(
                f"placement layers={list(layers[:8])}: ascending numbers, each once, expected"
            )
        slots = len(rows[0])
        for number, row in zip(layers, rows, strict=True):
            if len(row) != slots:
                raise PlacementError(
                    f"placement layer {number} has {len(row)} slots, layer {layers[0]} has {slots}: every "
                    "layer has equally many, -1 for an empty one"
                )
        self._check_sizes(slots)
        for number, row in zip(layers, rows, strict=True):
            self._check_row(number, row)

    def _check_sizes(self, slots: int) -> None:
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise PlacementError(f"placement experts={self.num_experts}: 1 to {MAX_EXPERTS} expected")
        if not 1 <= self.num_ranks <= slots:
            raise PlacementError(
                f"placement ranks={self.num_ranks}: 1 to {slots}, the number of slots, expected"
            )
        if slots % self.num_ranks:
            raise PlacementError(
                f"placement has {slots} slots on {self.num_ranks} ranks: every rank has equally many, so "
                "give the ranks of the expert-parallel group (ranks=)"
            )
        if slots * len(self.layers) > MAX_CELLS:
            raise PlacementError(f"placement has {slots * len(self.layers)} slots: at most {MAX_CELLS}")

    def _check_row(self, layer: int, row: tuple[int, ...]) -> None:
        for slot, expert in enumerate(row):
            if type(expert) is not int or not EMPTY <= expert < self.num_experts:
                raise PlacementError(
                    f"placement layer {layer} slot {slot} holds {expert!r}: experts are 0 to "
                    f"{self.num_experts - 1}, -1 for an empty slot"
                )
        homeless = set(range(self.num_experts)) - set(row)
        if homeless:
            raise PlacementError(
                f"placement layer {layer} has no slot for expert {min(homeless)}: every expert needs one at "
                "least"
            )

    @property
    def num_slots(self) -> int:
        """Slots per layer, over all ranks."""
        return len(self.physical_to_logical[0])

    @property
    def num_replicas(self) -> int:
        """Filled slots beyond one per expert, over all layers."""
        filled = sum(expert != EMPTY for row in self.physical_to_logical for expert in row)
        return filled - self.num_experts * len(self.layers)

    def as_json(self) -> dict[str, object]:
        """Plain JSON types, with the names of the placement files that other commands read."""
        return {
            "ranks": self.num_ranks,
            "experts": self.num_experts,
            "layers": list(self.layers),
            "physical_to_logical": [list(row) for row in self.physical_to_logical],
        }

    def digest(self) -> str:
        """SHA-256 of the mapping, hex: equal for equal mappings, whatever version they are given."""
        return sha256_hex(self.as_json())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTerms:
    """What is known of a placement beside the mapping; validated on construction."""

    policy_version: str = ""
    proposed_by: str = ""
    """Name of a service, never of a person."""
    window: tuple[int, int] | None = None
    """First and last step of the telemetry that it was chosen from."""
    max_slowdown: float = MAX_SLOWDOWN
    """Acceptance: the most that p95 may rise, as a part of it."""
    max_error_rate: float = MAX_ERROR_RATE
    """Acceptance: the most that the error rate may rise, absolute."""
    rollback_version: int | None = None
    """None: the version before."""
    count_ids: CountIds = CountIds.LOGICAL
    """What the run's expert counts are numbered by."""
    expert_bytes: int | None = None
    """Weights of one expert of one layer."""
    memory_bytes: int | None = None
    """Memory of a rank that routed experts may use."""
    weight_digests: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            PlacementError: names the field, its value and what is allowed.
        """
        for name in ("policy_version", "proposed_by"):
            text = getattr(self, name)
            if not isinstance(text, str) or len(text) > MAX_TEXT:
                raise PlacementError(f"placement {name}: a text of at most {MAX_TEXT} characters expected")
        if self.window is not None and not (
            len(self.window) == 2
            and all(type(step) is int for step in self.window)
            and 0 <= self.window[0] <= self.window[1] <= HIGHEST_STEP
        ):
            raise PlacementError(f"placement window={self.window!r}: (first step, last step) expected")
        for name in ("max_slowdown", "max_error_rate"):
            part = getattr(self, name)
            if type(part) not in (int, float) or not 0.0 <= part <= 100.0:
                raise PlacementError(f"placement {name}={part!r}: a part of 0 to 100 expected, as in 0.1")
        if self.rollback_version is not None:
            check_version("rollback_version", self.rollback_version)
        for name in ("expert_bytes", "memory_bytes"):
            size = getattr(self, name)
            if size is not None and (type(size) is not int or not 0 < size <= MAX_BYTES):
                raise PlacementError(f"placement {name}={size!r}: a whole number of bytes above 0 expected")
        self._check_weights()

    def _check_weights(self) -> None:
        if not isinstance(self.weight_digests, Mapping):
            raise PlacementError("placement weight_digests: name to hex digest expected")
        if len(self.weight_digests) > MAX_WEIGHTS:
            raise PlacementError(
                f"placement weight_digests: {len(self.weight_digests)} given, at most {MAX_WEIGHTS}"
            )
        for name, digest in self.weight_digests.items():
            if not isinstance(name, str) or len(name) > MAX_WEIGHT_NAME:
                raise PlacementError(
                    f"placement weight_digests: names of at most {MAX_WEIGHT_NAME} characters expected, got "
                    f"{str(name)[:80]!r}"
                )
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise PlacementError(
                    f"placement weight_digests[{name!r}]={digest!r}: 8 to 128 lower-case hex digits expected"
                )


def check_version(name: str, version: object) -> int:
    """A placement's version.

    Raises:
        PlacementError: not a whole number in range.
    """
    if type(version) is not int or not 0 <= version <= MAX_VERSION:
        raise PlacementError(f"placement {name}={version!r}: a whole number of 0 to {MAX_VERSION} expected")
    return version
