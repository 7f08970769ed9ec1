"""What an adapter says about a model: which callables are what. Adapters know their framework and this file only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from moetrace.record.sites import Role
from moetrace_schemas.enums import Phase


class Call(Enum):
    """How a callable is wrapped."""

    TIMED = "timed"
    LAUNCH = "launch"
    """A collective that may return at launch."""
    WAIT = "wait"
    """The wait for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchResult:
    """What the result of a dispatch says without a host sync."""

    received_ids: Any
    """Tensor [rows, 1] of local expert ids of the rows that this rank received, or None."""
    received_rows: int
    row_bytes: int
    send_sizes: list[int]
    """Rows sent to each ep_rank."""
    receive_sizes: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One callable to wrap: `owner.attribute`."""

    owner: Any
    attribute: str
    role: Role
    name: str
    phase: Phase | None = None
    layer: int | None = None
    call: Call = Call.TIMED
    shared: bool = False
    """The owner is a module or class of the framework: patched once, whatever the number of layers."""
    counts_routes: bool = False
    """The result holds the router's expert ids."""
    read_dispatch: Callable[[Any], DispatchResult] | None = None
    """Reads rows and sizes from the result of a dispatch."""
    per_step: bool = True
    """Expected to fire in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel:
    """Position in the expert-parallel group, as the model says it."""

    rank: int
    size: int
    group: int
    """Lowest global rank of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMatch:
    """One MoE layer that was found."""

    layer: int
    path: str
    adapter: str
    num_experts: int
    num_local_experts: int
    targets: tuple[Target, ...]
    phases: tuple[Phase, ...]
    """Phases that will be told apart."""
    fused: tuple[Phase, ...] = ()
    """Phases that will be reported together as `fused` or inside another one."""
    counted: bool = True
    parallel: ExpertParallel | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMatch:
    """What an adapter found in a model."""

    layers: tuple[LayerMatch, ...]
    skipped: tuple[tuple[str, str], ...] = field(default=())
    """(module path, why it was left alone)."""


class Adapter(Protocol):
    """Recognises MoE layers of one framework."""

    name: str
    looks_for: str
    """One sentence for the message when nothing was found."""

    def match(self, model: Any) -> ModelMatch:
        """Layers of this framework in `model`; never changes it."""
        ...


def layer_number(path: str, taken: Sequence[int]) -> int:
    """The block number in a module path (`model.layers.3.mlp` -> 3), or the next free one.

    The last number that is followed by a name counts, so that `experts.5` inside a block does not.
    """
    numbers = [int(part) for part in path.split(".")[:-1] if part.isdigit()]
    if numbers and numbers[-1] not in taken:
        return numbers[-1]
    return max(taken, default=-1) + 1
