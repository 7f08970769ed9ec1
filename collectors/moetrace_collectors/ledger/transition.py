"""What a change of placement amounts to: copies, replicas, memory; and the ledger row that says so. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from moetrace_collectors.ledger.chain import LedgerRow
from moetrace_collectors.load.expert_map import Placement
from moetrace_collectors.model import PlacementReport
from moetrace_collectors.placement.migration import copies_needed
from moetrace_schemas.enums import PlacementEvent
from moetrace_schemas.placement import PlacementMap, PlacementTerms, canonical_json

MAX_LISTED_MOVES = 20_000
"""(layer, expert, rank) that a ledger row lists; beyond it only the numbers are kept."""


class MemoryCheck(StrEnum):
    """Whether a rank can hold what the mapping gives it."""

    FITS = "fits"
    DOES_NOT_FIT = "does_not_fit"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingChange:
    """From one mapping to another, over the layers of the new one."""

    experts_copied: int
    """Experts that a rank must fetch because it does not hold them yet, over all layers."""
    copies_by_rank: tuple[int, ...]
    replicas_added: int
    """Change of filled slots."""
    experts_with_other_replicas: int
    """(layer, expert) whose number of replicas changed."""
    moves: tuple[tuple[int, int, int], ...] | None
    """(layer, expert, rank that fetches it); None where they are too many to list."""


def as_placement(mapping: PlacementMap) -> Placement:
    """The mapping as arrays."""
    return Placement(
        physical_to_logical=np.array(mapping.physical_to_logical, dtype=np.int64),
        num_experts=mapping.num_experts,
        num_ranks=mapping.num_ranks,
    )


def placement_of_layers(mapping: PlacementMap, layers: Sequence[int]) -> Placement:
    """The mapping as arrays, of these layers where it names them all; else as it is, in order."""
    rows = dict(zip(mapping.layers, mapping.physical_to_logical, strict=True))
    if not set(layers) <= set(rows):
        return as_placement(mapping)
    return Placement(
        physical_to_logical=np.array([rows[layer] for layer in layers], dtype=np.int64),
        num_experts=mapping.num_experts,
        num_ranks=mapping.num_ranks,
    )


def mapping_change(before: PlacementMap, after: PlacementMap) -> MappingChange | None:
    """What the change takes; None where the two cannot be compared (other layers, experts or ranks)."""
    known = dict(zip(before.layers, before.physical_to_logical, strict=True))
    if (before.num_experts, before.num_ranks) != (after.num_experts, after.num_ranks) or not set(
        after.layers
    ) <= set(known):
        return None
    old = Placement(
        physical_to_logical=np.array([known[layer] for layer in after.layers], dtype=np.int64),
        num_experts=before.num_experts,
        num_ranks=before.num_ranks,
    )
    new = as_placement(after)
    copies = copies_needed(old, new)
    fetched = (new.replicas_on_rank > 0) & ~(old.replicas_on_rank > 0)
    moves = None
    if copies.sum() <= MAX_LISTED_MOVES:
        moves = tuple(
            (after.layers[int(layer)], int(expert), int(rank)) for layer, expert, rank in np.argwhere(fetched)
        )
    return MappingChange(
        experts_copied=int(copies.sum()),
        copies_by_rank=tuple(int(count) for count in copies.sum(axis=0)),
        replicas_added=int(new.replica_counts.sum() - old.replica_counts.sum()),
        experts_with_other_replicas=int((new.replica_counts != old.replica_counts).sum()),
        moves=moves,
    )


def needed_bytes(mapping: PlacementMap, expert_bytes: int) -> int:
    """Weights on the fullest rank, all layers of the mapping."""
    held = as_placement(mapping).replicas_on_rank.sum(axis=(0, 1))
    return int(held.max()) * expert_bytes


def check_memory(mapping: PlacementMap, terms: PlacementTerms) -> MemoryCheck:
    """Whether the fullest rank can hold its experts, where both sizes were told."""
    if terms.expert_bytes is None or terms.memory_bytes is None:
        return MemoryCheck.UNKNOWN
    fits = needed_bytes(mapping, terms.expert_bytes) <= terms.memory_bytes
    return MemoryCheck.FITS if fits else MemoryCheck.DOES_NOT_FIT


def mapping_row(
    report: PlacementReport,
    *,
    before: PlacementMap | None,
    before_version: int,
    in_force: PlacementMap | None,
    time_unix_ms: int,
) -> LedgerRow:
    """The ledger row of a mapping that was announced or proposed; not yet linked into a chain.

    Args:
        report: what was received.
        before: the mapping in force before it, where known.
        before_version: its version; 0 where unknown.
        in_force: what replaces `before`: the report's mapping over the layers that it leaves as they are.
        time_unix_ms: now.
    """
    terms, mapping = report.terms, report.mapping
    change = None if before is None else mapping_change(before, mapping)
    size = terms.expert_bytes
    copied_bytes = None if change is None or size is None else change.experts_copied * size
    memory = check_memory(in_force or mapping, terms)
    rollback = before_version if terms.rollback_version is None else terms.rollback_version
    document: dict[str, Any] = {
        "placement": mapping.as_json(),
        "terms": {
            "policy_version": terms.policy_version,
            "proposed_by": terms.proposed_by,
            "telemetry_window": None if terms.window is None else list(terms.window),
            "max_slowdown": float(terms.max_slowdown),
            "max_error_rate": float(terms.max_error_rate),
            "rollback_version": rollback,
            "count_ids": terms.count_ids.value,
            "weight_digests": dict(terms.weight_digests),
        },
        "memory": {
            "result": memory.value,
            "expert_bytes": size,
            "available_bytes": terms.memory_bytes,
            "needed_bytes": None if size is None else needed_bytes(in_force or mapping, size),
        },
        "migration": None if change is None else _plan(change, copied_bytes),
        "sender": {"rank": report.rank, "host": report.host_name},
    }
    return LedgerRow(
        run_id=report.run_id,
        sequence=0,
        time_unix_ms=time_unix_ms,
        event=report.event.value,
        version=report.version,
        previous_version=before_version,
        rollback_version=rollback,
        step=report.step if report.event is PlacementEvent.ANNOUNCED else None,
        digest=mapping.digest(),
        policy_version=terms.policy_version,
        proposed_by=terms.proposed_by,
        memory=memory.value,
        experts_copied=None if change is None else change.experts_copied,
        copied_bytes=copied_bytes,
        replicas_added=None if change is None else change.replicas_added,
        document=canonical_json(document).decode(),
    )


def _plan(change: MappingChange, copied_bytes: int | None) -> dict[str, Any]:
    return {
        "experts_copied": change.experts_copied,
        "copied_bytes": copied_bytes,
        "copies_by_rank": list(change.copies_by_rank),
        "replicas_added": change.replicas_added,
        "experts_with_other_replicas": change.experts_with_other_replicas,
        "moves": None if change.moves is None else [list(move) for move in change.moves],
    }


def applied_row(
    *,
    run_id: str,
    version: int,
    before_version: int,
    rollback_version: int,
    step: int,
    digest: str,
    num_ranks: int,
    time_unix_ms: int,
) -> LedgerRow:
    """The row of the first joined step of an epoch."""
    return LedgerRow(
        run_id=run_id,
        sequence=0,
        time_unix_ms=time_unix_ms,
        event=PlacementEvent.APPLIED.value,
        version=version,
        previous_version=before_version,
        rollback_version=rollback_version,
        step=step,
        digest=digest,
        document=canonical_json({"ranks_of_step": num_ranks, "mapping_known": bool(digest)}).decode(),
    )


def judged_row(
    *,
    run_id: str,
    version: int,
    before_version: int,
    rollback_version: int,
    digest: str,
    verdict: str,
    document: str,
    time_unix_ms: int,
) -> LedgerRow:
    """The row of a comparison; the document is canonical JSON."""
    return LedgerRow(
        run_id=run_id,
        sequence=0,
        time_unix_ms=time_unix_ms,
        event=PlacementEvent.JUDGED.value,
        version=version,
        previous_version=before_version,
        rollback_version=rollback_version,
        digest=digest,
        verdict=verdict,
        document=document,
    )


def mapping_of(row: LedgerRow) -> PlacementMap:
    """The mapping that a row of event announced or proposed holds.

    Raises:
        ValueError: the document is not what such a row holds.
    """
    told = part_of(row, "placement")
    try:
        return PlacementMap(
            layers=tuple(told["layers"]),
            physical_to_logical=tuple(tuple(slots) for slots in told["physical_to_logical"]),
            num_experts=told["experts"],
            num_ranks=told["ranks"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"ledger row {row.sequence} of run {row.run_id} holds no placement") from error


def part_of(row: LedgerRow, name: str) -> dict[str, Any]:
    """A named part of a row's document.

    Raises:
        ValueError: there is none: somebody has changed the row.
    """
    try:
        document = json.loads(row.document)
    except ValueError as error:
        raise ValueError(f"ledger row {row.sequence} of run {row.run_id} is no JSON: {error}") from error
    part = document.get(name) if isinstance(document, dict) else None
    if not isinstance(part, dict):
        raise ValueError(f"ledger row {row.sequence} of run {row.run_id} holds no {name}")
    return part


def overlay(before: PlacementMap | None, after: PlacementMap) -> PlacementMap:
    """`after`, and `before` in the layers that it does not name: pipeline stages announce their own."""
    if before is None or (before.num_experts, before.num_ranks, before.num_slots) != (
        after.num_experts,
        after.num_ranks,
        after.num_slots,
    ):
        return after
    rows = dict(zip(before.layers, before.physical_to_logical, strict=True))
    rows.update(zip(after.layers, after.physical_to_logical, strict=True))
    layers = sorted(rows)
    return PlacementMap(
        layers=tuple(layers),
        physical_to_logical=tuple(rows[layer] for layer in layers),
        num_experts=after.num_experts,
        num_ranks=after.num_ranks,
    )
