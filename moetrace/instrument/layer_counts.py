"""What is counted of a layer that an adapter has found."""

from __future__ import annotations

from moetrace.adapters.base import LayerMatch
from moetrace.record.count_sites import CountSite
from moetrace_schemas.enums import CountKind


def layer_counts(match: LayerMatch) -> list[CountSite]:
    """All counts of one layer; none where the number of its experts is not known."""
    first = match.parallel.rank * match.num_local_experts if match.parallel is not None else 0
    return [_count_site(match, kind, first) for kind in _count_kinds(match)]


def _count_site(match: LayerMatch, kind: CountKind, first: int) -> CountSite:
    """One kind of count of a layer; `first` is the first expert of this rank."""
    if kind is CountKind.ROUTED:
        return CountSite(
            match.layer,
            match.num_experts,
            weight_sums=match.weight_sums,
            slots=match.slots,
            sentinels=match.sentinels,
            ep_size=match.parallel.size if match.parallel is not None else 1,
            exact_rows=match.exact_rows,
        )
    if kind is CountKind.RECEIVED and not _shows_received(match):
        # What an exchange says is of slots: with replicas, not of the layer's experts in order.
        return CountSite(match.layer, match.num_experts, kind, at_exchange=not match.num_physical)
    if kind is CountKind.PHYSICAL:
        return CountSite(match.layer, match.num_physical, kind, sentinels=match.sentinels)
    here = kind is CountKind.RECEIVED or (kind is CountKind.EXECUTED and match.parallel is not None)
    local = (first, match.num_local_experts) if here and not match.received_logical else (0, 0)
    return CountSite(match.layer, match.num_experts, kind, *local)


def _shows_received(match: LayerMatch) -> bool:
    return any(
        target.count_kind is CountKind.RECEIVED or target.read_dispatch is not None
        for target in match.targets
    )


def _count_kinds(match: LayerMatch) -> list[CountKind]:
    """Kinds of counts of one layer; none where the number of experts is not known."""
    if not match.num_experts:
        return []
    kinds = {CountKind.ROUTED, *(target.count_kind for target in match.targets)}
    if match.parallel is not None:
        kinds.add(CountKind.RECEIVED)
    if match.executed:
        kinds.add(CountKind.EXECUTED)
    return [kind for kind in CountKind if kind in kinds]
