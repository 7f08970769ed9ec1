"""Routing receipts: what was selected, admitted and executed per expert, and what in it cannot be true.

Pure; runs in the drain thread. Everything counted is a number of (token, slot) pairs, padding tokens
included: they are routed and computed as all others are.

    selected = admitted + dropped        the router chose; an expert's capacity refused some
    admitted = executed                  over the expert-parallel group; on one rank without it

What is admitted of a dummy batch is nobody's, and becomes one total; what its rank's experts got meanwhile is
work for the others, and stays.

A contradiction is counted by reason and told; nothing is ever raised into the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from moetrace.record.count_sites import DESTINATION_SIDE, CountSite
from moetrace.record.expert_homes import ExpertHomes
from moetrace.record.types import ExpertRow, TrafficRecord, ViolationRow
from moetrace_schemas.enums import CountKind, Phase, RoutingViolation

Kinds = Mapping[CountKind, tuple[int, ...]]
"""Counts of one layer by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingReceipt:
    """One layer in one step of one rank; counts per logical expert."""

    layer: int
    selected: tuple[int, ...]
    """Chosen by this rank's router."""
    admitted: tuple[int, ...]
    """Of them, those that got a place."""
    executed: tuple[int, ...] | None
    """Rows that this rank's experts computed, of all ranks; None where the framework does not show it, or
    where it is what was admitted."""

    @property
    def dropped(self) -> tuple[int, ...]:
        """Selected and not admitted."""
        return tuple(s - a for s, a in zip(self.selected, self.admitted, strict=True))


def receipts(experts: Iterable[ExpertRow]) -> tuple[RoutingReceipt, ...]:
    """Receipts of the layers whose router was counted, in order of layer."""
    result = []
    for layer, kinds in sorted(_by_layer(experts).items()):
        if CountKind.ROUTED not in kinds:
            continue
        admitted = _admitted(kinds)
        result.append(
            RoutingReceipt(
                layer=layer,
                selected=_plus(admitted, kinds.get(CountKind.DROPPED, ())),
                admitted=admitted,
                executed=kinds.get(CountKind.EXECUTED, kinds.get(CountKind.RECEIVED)),
            )
        )
    return tuple(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The counts of a step as they leave the process, and what contradicts them."""

    experts: tuple[ExpertRow, ...]
    violations: tuple[ViolationRow, ...]


def settle(
    experts: Sequence[ExpertRow],
    sites: Iterable[CountSite],
    *,
    traffic: Sequence[TrafficRecord] = (),
    seen: Iterable[ViolationRow] = (),
    homes: ExpertHomes | None = None,
    checking: bool = True,
    unjudged: Collection[int] = (),
    dummy: bool = False,
) -> Settled:
    """Check the counts of one step, and leave out what says nothing new.

    Args:
        experts: rows as counted.
        sites: what was counted, and what models promise.
        traffic: rows that dispatchers say they sent.
        seen: what was found on the device.
        homes: ranks of the experts under the placement in force; None where they are placed in order.
        checking: whether the step is checked; of others only ids out of range are told.
        unjudged: layers of which some kinds were counted in a part of the step only (replayed graphs): their
            kinds are not held against each other, and what was executed is not told.
        dummy: the step is a dummy batch: ids and weights of nobody's tokens are not judged.
    """
    by_layer = _by_layer(experts)
    told = tuple(
        _not_below_zero(row) if row.kind is CountKind.DROPPED else row
        for row in experts
        if row.kind is not CountKind.EXECUTED
        or (row.layer not in unjudged and _says_more(row, by_layer[row.layer]))
    )
    if dummy:
        return Settled(experts=_dummy_totals(by_layer, told), violations=())
    totals: dict[tuple[int, RoutingViolation], int] = {}

    def add(layer: int, violation: RoutingViolation, count: int) -> None:
        if count > 0:
            totals[(layer, violation)] = totals.get((layer, violation), 0) + count

    for row in seen:
        add(row.layer, row.violation, row.count)
    rules = {site.layer: site for site in sites if site.kind is CountKind.ROUTED}
    sent = {item.layer: item.rows for item in traffic if item.phase is Phase.DISPATCH}
    for layer, kinds in by_layer.items():
        rule = rules.get(layer)
        if rule is None or CountKind.ROUTED not in kinds:
            continue
        if not rule.sentinels and CountKind.INVALID in kinds:
            add(layer, RoutingViolation.ID_OUT_OF_RANGE, sum(kinds[CountKind.INVALID]))
        if not checking or layer in unjudged:
            continue
        # An adapter takes what was dropped as what was selected less what was admitted.
        dropped = kinds.get(CountKind.DROPPED, ())
        add(layer, RoutingViolation.CONSERVATION, sum(-count for count in dropped if count < 0))
        for violation, count in _executed(kinds, rule.ep_size):
            add(layer, violation, count)
        if layer in sent:
            add(layer, RoutingViolation.TRAFFIC_MISMATCH, _misdirected(kinds, rule, sent[layer], homes))
    return Settled(
        experts=told,
        violations=tuple(
            ViolationRow(layer=layer, violation=violation, count=count)
            for (layer, violation), count in sorted(totals.items())
        ),
    )


def _dummy_totals(by_layer: Mapping[int, Kinds], told: Iterable[ExpertRow]) -> tuple[ExpertRow, ...]:
    """Per layer one total of the pairs for which rows are sent, then what experts got.

    No row is sent for dropped and invalid pairs, and a group is checked by its sums.
    """
    totals = (
        ExpertRow(
            layer=layer,
            kind=CountKind.DUMMY,
            counts=(sum(_admitted(kinds)),),
        )
        for layer, kinds in sorted(by_layer.items())
        if CountKind.ROUTED in kinds
    )
    return (*totals, *(row for row in told if row.kind in DESTINATION_SIDE))


def _not_below_zero(dropped: ExpertRow) -> ExpertRow:
    """A surplus over what was selected is told as a violation, in checked steps."""
    return replace(dropped, counts=tuple(max(count, 0) for count in dropped.counts))


def expected_rows(kinds: Kinds, rule: CountSite, homes: ExpertHomes | None) -> tuple[int, ...] | None:
    """Rows that each rank of the group should get of this one; None where nobody says who holds what."""
    admitted, num_ranks = _admitted(kinds), rule.ep_size
    if homes is not None:
        return homes.rows_by_rank(rule.layer, admitted, num_ranks)
    if rule.num_experts % num_ranks:
        return None
    local = len(admitted) // num_ranks
    return tuple(sum(admitted[rank * local : (rank + 1) * local]) for rank in range(num_ranks))


def _executed(kinds: Kinds, ep_size: int) -> tuple[tuple[RoutingViolation, int], ...]:
    """What one rank can tell: against what it admitted, or, of several ranks, against what it received."""
    executed = kinds.get(CountKind.EXECUTED)
    admitted = _admitted(kinds) if ep_size == 1 else kinds.get(CountKind.RECEIVED)
    if executed is None or admitted is None:
        return ()
    surplus = sum(max(e - a, 0) for e, a in zip(executed, admitted, strict=True))
    return (
        (RoutingViolation.EXECUTED_NOT_SELECTED, surplus),
        (RoutingViolation.CONSERVATION, sum(admitted) - sum(executed)),
    )


def _misdirected(kinds: Kinds, rule: CountSite, sent: tuple[int, ...], homes: ExpertHomes | None) -> int:
    """Rows that went to another rank than that of their expert, or did not go."""
    if not rule.exact_rows or len(sent) != rule.ep_size:
        return 0
    expected = expected_rows(kinds, rule, homes)
    return sum(abs(a - b) for a, b in zip(expected, sent, strict=True)) if expected is not None else 0


def _says_more(executed: ExpertRow, kinds: Kinds) -> bool:
    received = kinds.get(CountKind.RECEIVED)
    return executed.counts != (received if received is not None else _admitted(kinds))


def _admitted(kinds: Kinds) -> tuple[int, ...]:
    return _plus(kinds.get(CountKind.ROUTED, ()), kinds.get(CountKind.PADDING, ()))


def _plus(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True)) if other else one


def _by_layer(experts: Iterable[ExpertRow]) -> dict[int, dict[CountKind, tuple[int, ...]]]:
    result: dict[int, dict[CountKind, tuple[int, ...]]] = {}
    for row in experts:
        result.setdefault(row.layer, {})[row.kind] = row.counts
    return result
