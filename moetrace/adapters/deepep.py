"""DeepEP: communication buffers that several frameworks exchange rows with.

A buffer belongs to no layer; its calls are exchanges of the layer that makes them, dispatch or combine
by their place around the experts. They may return at launch, and end with the event that the caller
waits for, or with the hook that the caller runs to receive.

Buffers by version: `Buffer` (1.x, kept beside the others in 2.0 to 2.2), `ElasticBuffer` (2.x),
`EPBuffer` (2.5), `HybridEPBuffer` (hybrid-ep branch, sync only). Which methods a class has, and what a
result holds, is looked at; no version is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from moetrace.adapters.base import Call, Target
from moetrace.record.sites import Role
from moetrace_schemas.enums import Phase

PACKAGES = ("deep_ep", "deep_ep_v25")
"""Names that releases are imported by."""
CLASSES = ("Buffer", "ElasticBuffer", "EPBuffer", "HybridEPBuffer", "HybridEpBuffer")
EXCHANGES = ("dispatch", "combine")
"""How the names of methods that exchange rows begin, `low_latency_` put aside."""
LAYOUT = "get_dispatch_layout"
"""Works out, on this rank, how many rows go where."""
WAITS = ("current_stream_wait", "__exit__")
"""Methods of an event that wait for it. The `with` block of 1.x waits past the first of them."""


def exchanges() -> list[Target]:
    """Targets of the imported packages; none where none is imported."""
    return [target for name in PACKAGES if name in sys.modules for target in _of_package(name)]


def _of_package(name: str) -> list[Target]:
    package, target = sys.modules[name], partial(_target, name)
    targets = []
    for owner in dict.fromkeys(filter(None, (getattr(package, each, None) for each in CLASSES))):
        targets += [target(owner, each, Role.EXCHANGE, Call.RECEIVE) for each in _exchanging(owner)]
        if callable(getattr(owner, LAYOUT, None)):
            targets.append(target(owner, LAYOUT, Role.PHASE, Call.TIMED, Phase.PERMUTE))
    event = getattr(package, "EventOverlap", None) or getattr(
        sys.modules.get(f"{name}.utils"), "EventOverlap", None
    )
    if hasattr(event, WAITS[0]):
        targets += [target(event, each, Role.WAIT, Call.WAIT_EVENT) for each in WAITS if hasattr(event, each)]
    return targets


def _exchanging(owner: Any) -> Iterator[str]:
    for name in dir(owner):
        if name.removeprefix("low_latency_").startswith(EXCHANGES) and callable(getattr(owner, name)):
            yield name


def _target(
    package: str, owner: Any, attribute: str, role: Role, call: Call, phase: Phase | None = None
) -> Target:
    return Target(
        owner=owner,
        attribute=attribute,
        role=role,
        name=f"{package}.{owner.__name__}.{attribute}",
        phase=phase,
        call=call,
        shared=True,
        per_step=False,
    )


READ = ("self", "handle", "expert_alignment")
"""Arguments that `received_rows` looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRows:
    """Rows of one dispatch by local expert of this rank; exactly one of the three is there."""

    rank: int
    """Of this rank in the buffer's group: experts are placed in order of rank."""
    ranks: int
    """Ranks of that group."""
    counts: Any = None
    """[local experts]: a list that is known already, or a tensor that is filled when the rows are there."""
    sums: Any = None
    """[local experts]: a tensor of inclusive prefix sums of them, filled when the rows are there."""
    ids: Any = None
    """[rows, K]: local ids, -1 for experts of other ranks; filled when the rows are there."""

    @property
    def known(self) -> bool:
        """Whether the host has them already."""
        return isinstance(self.counts, list)


def received_rows(method: str, given: Mapping[str, Any], result: Any) -> ReceivedRows | None:
    """What the result of a call says about the rows that this rank received; never waits.

    None for calls that receive none, for a handle that was used before (its rows were counted then, or
    it is a gradient that comes back), for hybrid buffers (their numbers are padded, or not there yet),
    and where a version says numbers that are rounded up and nothing exact beside them.

    Args:
        method: name of the method.
        given: its arguments by name, `self` included.
        result: what it returned, or what the wait for a deferred one returned.
    """
    owner = given.get("self")
    rank = getattr(owner, "rank_idx", getattr(owner, "rank", None))
    ranks = getattr(owner, "num_ranks", getattr(owner, "group_size", None))
    if not isinstance(rank, int) or not isinstance(ranks, int) or given.get("handle") is not None:
        return None
    place = partial(ReceivedRows, rank=rank, ranks=ranks)
    if not isinstance(result, tuple):
        return None
    if method == "low_latency_dispatch":
        # (rows, rows per local expert, handle, event, hook)
        return place(counts=result[1])
    if method != "dispatch" or len(result) < 4:
        return None
    # 1.x: (rows, ids, weights, rows per local expert, handle, event); 2.x has them in the handle.
    handle = None if isinstance(result[3], list) else result[3]
    numbers = result[3] if handle is None else getattr(handle, "num_recv_tokens_per_expert_list", None)
    exact = (given.get("expert_alignment") or getattr(handle, "expert_alignment", 1) or 1) == 1
    if numbers and exact:
        return place(counts=list(numbers))
    counts = getattr(handle, "num_unaligned_recv_tokens_per_expert", None)
    if counts is not None and getattr(handle, "do_expand", False):
        return place(counts=counts)
    sums = getattr(handle, "psum_num_recv_tokens_per_expert", None)
    if sums is not None and exact:
        return place(sums=sums)
    # Without numbers of the host, rows behind the received ones hold ids of earlier batches in 2.x.
    if result[1] is not None and (handle is None or numbers):
        return place(ids=result[1])
    return None
