"""What an adapter says about a model: which callables are what.

Adapters know their framework and the modules of this folder only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from moetrace.record.sites import Role
from moetrace_schemas.enums import CountKind, ForwardMode, Phase


class Call(Enum):
    """How a callable is wrapped."""

    TIMED = "timed"
    LAUNCH = "launch"
    """A collective that may return at launch."""
    WAIT = "wait"
    """The wait for one that returned a tensor."""
    WAIT_WORK = "wait_work"
    """The wait for one that returned a Work object."""
    WAIT_EVENT = "wait_event"
    """The wait for one that returned an event (DeepEP)."""
    RECEIVE = "receive"
    """A collective that may return an event to wait for, or a hook that receives (DeepEP)."""
    COUNT = "count"
    """Not timed: only `Target.count` looks at the call."""


class RouteCounter(Protocol):
    """What count functions write to: one row per layer and kind, on the device, without a host sync."""

    checking: bool
    """Whether routing is checked in this step; else `add_executed` and `check_weights` need not be called."""

    def counted(self, index: int) -> bool:
        """Whether anything was counted in this row and step, inside a compiled graph too."""
        ...

    def add(self, index: int, expert_ids: Any, padding: Any | None = None) -> None:
        """Integer tensor [.., K] of expert ids.

        `padding`: a tensor [T], true for rows that are no tokens, where the framework says it by call.
        """
        ...

    def add_mask(self, index: int, mask: Any, pairs: int) -> None:
        """Tensor [.., E], non-zero where a token goes to an expert.

        `pairs`: rows times slots, which the host knows without a sync.
        """
        ...

    def add_counts(self, index: int, counts: Any, pairs: int) -> None:
        """Pairs per expert, [E] (local experts for `received`): an integer tensor or a list of numbers."""
        ...

    def add_rows(self, index: int, expert: int, rows: int) -> None:
        """Rows of one expert, where the host knows them anyway."""
        ...

    def add_executed(self, index: int, expert_ids: Any) -> None:
        """Ids [.., K] that the experts are called with, where the router's own were counted at `index`."""
        ...

    def check_weights(self, index: int, weights: Any) -> None:
        """Weights [.., K] that go with the ids of a router call."""
        ...


Count = Callable[[RouteCounter, int, tuple[Any, ...], dict[str, Any], Any], None]
"""(counter, row index, positional arguments, keyword arguments, result) of one call."""


def traceable(count: Any) -> Any:
    """Mark a count function that torch.compile can follow: its counts then become part of the graph."""
    count.moetrace_traceable = True
    return count


def is_traceable(count: Count) -> bool:
    """Whether a count function was marked so."""
    return bool(getattr(count, "moetrace_traceable", False))


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
    exchanges_behind: int = 0
    """Exchanges of the call that come behind that of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One callable to wrap: `owner.attribute`."""

    owner: Any
    attribute: str
    role: Role
    name: str
    phase: Phase | None = None
    """What the call is; of a LAYER, what its time between its parts is (None: glue, named by its place)."""
    layer: int | None = None
    call: Call = Call.TIMED
    shared: bool = False
    """The owner is a module or class of the framework: patched once, whatever the number of layers."""
    counts_routes: bool = False
    """The result holds the router's expert ids."""
    read_dispatch: Callable[[Any], DispatchResult | None] | None = None
    """Reads rows and sizes from the result of a dispatch; None where they are not known on the host."""
    per_step: bool = True
    """Expected to fire in every step."""
    count: Count | None = None
    """Counts what a call shows (Call.COUNT); placed after the timed target of the same callable, so that
    counting is not charged to the phase."""
    count_kind: CountKind = CountKind.ROUTED


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
    weight_sums: tuple[float, ...] = ()
    """What the routing weights of a token add up to, where the model says so; one of several."""
    num_physical: int = 0
    """Slots of all ranks where experts are replicated; 0 where they are not."""
    received_logical: bool = False
    """Rows received are told by logical expert, and not by those that this rank holds in order."""
    slots: int = 0
    """Most experts that a router which shows a mask gives a token; 0 where that is not known."""
    sentinels: bool = False
    """Ids that are no expert stand for "none", and are no fault of the router."""
    exact_rows: bool = True
    """Rows sent are one per pair, to the rank of its expert; False for rows padded to a capacity, and for
    one copy per rank."""
    executed: bool = False
    """The experts show what they are called with, apart from what the router chose."""
    parallel: ExpertParallel | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What an engine's call says of the forward that it runs."""

    forward_mode: ForwardMode | None = None
    """None where it does not say."""
    dummy: bool = False
    """A batch of no request."""
    warmup: bool = False
    """To measure, to tune or to capture, before there are requests."""
    is_step: bool = True
    """The call is one step; False for one that runs several forwards, or maybe none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """A method of a serving engine that runs forwards of a model."""

    owner: Any
    attribute: str
    read: Callable[[tuple[Any, ...], dict[str, Any]], StepFacts | None]
    """Reads positional and keyword arguments of a call; None where they say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMatch:
    """What an adapter found in a model."""

    layers: tuple[LayerMatch, ...]
    skipped: tuple[tuple[str, str], ...] = field(default=())
    """(module path, why it was left alone)."""
    engine_calls: tuple[EngineCall, ...] = ()
    """Calls around the model's own, which say what a step is for."""


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


def layer_numbers(paths: Sequence[str]) -> list[int]:
    """Layer numbers of blocks by their module paths: the model's own numbers, each given once.

    The first block that carries a number keeps it; further ones (a decoder beside its encoder, a second
    block in one layer) get numbers behind all of those, in order.
    """
    own: list[int | None] = []
    for path in paths:
        numbers = [int(part) for part in path.split(".") if part.isdigit()]
        said = numbers[-1] if numbers else 0
        own.append(None if said in own else said)
    following = max((number for number in own if number is not None), default=-1) + 1
    result: list[int] = []
    for number in own:
        if number is None:
            result.append(following)
            following += 1
        else:
            result.append(number)
    return result
