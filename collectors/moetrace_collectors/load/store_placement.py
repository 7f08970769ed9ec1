"""The mapping that an epoch ran under and the size of its experts, as the ledger has them."""

from __future__ import annotations

from dataclasses import dataclass

from moetrace_collectors.ledger.reading import announced
from moetrace_collectors.ledger.transition import placement_of_layers
from moetrace_collectors.load.expert_map import Placement
from moetrace_collectors.model import IntArray
from moetrace_collectors.views.store_rows import Store
from moetrace_schemas.placement import PlacementMap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LedgerEntry:
    """What was announced of one placement version; None where it was not."""

    version: int
    mapping: PlacementMap | None = None
    expert_bytes: int | None = None


def read_entry(store: Store, run_id: str, version: int) -> LedgerEntry:
    """The ledger's entry of an epoch.

    Raises:
        UsageError: the store does not answer.
    """
    mapping, expert_bytes = announced(store, run_id, version)
    return LedgerEntry(version=version, mapping=mapping, expert_bytes=expert_bytes)


def placement_of(
    entry: LedgerEntry, layers: IntArray, *, num_experts: int, num_ranks: int | None, warnings: list[str]
) -> Placement | None:
    """The mapping of these layers; None where there is none, or (with a warning) one of another model."""
    mapping = entry.mapping
    if mapping is None:
        return None
    unknown = sorted(set(layers.tolist()) - set(mapping.layers))
    wrong = ""
    if unknown:
        wrong = f"does not name layer {unknown[0]}"
    elif mapping.num_experts != num_experts:
        wrong = f"is of {mapping.num_experts} experts, counted are {num_experts}"
    elif num_ranks is not None and mapping.num_ranks != num_ranks:
        wrong = f"is of {mapping.num_ranks} ranks, groups have {num_ranks}"
    if wrong:
        warnings.append(f"the ledger's mapping of version {entry.version} {wrong}: it is not used")
        return None
    return placement_of_layers(mapping, layers.tolist())
