"""The hash chain of a run's ledger: how a row is digested, appended, and found to be changed. Pure.

::

    row 0  previous_hash 000..0   row_hash a = sha256(all columns of row 0)
    row 1  previous_hash a        row_hash b = sha256(all columns of row 1)
    row 2  previous_hash b        row_hash c

A changed column breaks its row's own hash; a row that was recomputed breaks the link of the next one; a row
that is gone leaves a hole in the numbers. Only rows cut off at the end leave no trace inside the chain: keep
the last hash elsewhere (`moetrace placement verify` prints it) and give it as the expected one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import pairwise

from moetrace_schemas.placement import sha256_hex

GENESIS = "0" * 64
"""previous_hash of the first row of a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One row of placement_ledger; fields are its columns."""

    run_id: str
    sequence: int
    time_unix_ms: int
    event: str
    """A PlacementEvent; any text, so that a row that was tampered with can be read."""
    version: int
    previous_version: int = 0
    rollback_version: int = 0
    step: int | None = None
    digest: str = ""
    policy_version: str = ""
    proposed_by: str = ""
    memory: str = ""
    experts_copied: int | None = None
    copied_bytes: int | None = None
    replicas_added: int | None = None
    verdict: str = ""
    document: str = "{}"
    """Canonical JSON."""
    previous_hash: str = GENESIS
    row_hash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a verification needs of a row: a chain of many mappings is never held in memory."""

    sequence: int
    time_unix_ms: int
    event: str
    version: int
    previous_hash: str
    row_hash: str
    """As the row says."""
    content_hash: str
    """Of what the row holds."""

    @property
    def is_whole(self) -> bool:
        """Whether the row holds what it was written with."""
        return self.content_hash == self.row_hash


class FaultKind(StrEnum):
    """What is wrong with a chain."""

    CHANGED = "changed"
    MISSING = "missing"
    REORDERED = "reordered"
    FORKED = "forked"
    CUT = "cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong, and the row that it names."""

    kind: FaultKind
    sequence: int
    sentence: str


def hash_row(row: LedgerRow) -> str:
    """SHA-256 over every column but the hash itself, hex."""
    return sha256_hex({f.name: getattr(row, f.name) for f in fields(row) if f.name != "row_hash"})


def append(head: LedgerRow | None, row: LedgerRow) -> LedgerRow:
    """The row as the next one behind `head`: numbered, linked and hashed."""
    linked = replace(
        row,
        sequence=0 if head is None else head.sequence + 1,
        previous_hash=GENESIS if head is None else head.row_hash,
        row_hash="",
    )
    return replace(linked, row_hash=hash_row(linked))


def link(row: LedgerRow) -> Link:
    """Hash a row."""
    return Link(
        sequence=row.sequence,
        time_unix_ms=row.time_unix_ms,
        event=row.event,
        version=row.version,
        previous_hash=row.previous_hash,
        row_hash=row.row_hash,
        content_hash=hash_row(row),
    )


def verify_links(links: Iterable[Link], *, expected_head: str | None = None) -> tuple[Fault, ...]:
    """Every fault of one run's chain, in order of rows.

    Args:
        links: of one run, in any order; a row that is there twice, alike in everything, is one.
        expected_head: hash of a row that is known to have been written.
    """
    chain = sorted(set(links), key=lambda row: (row.sequence, row.time_unix_ms, row.row_hash))
    faults = [_changed(row) for row in chain if not row.is_whole]
    if chain and chain[0].sequence > 0:
        faults.append(_missing(0, chain[0].sequence))
    owner = {row.row_hash: row for row in chain}
    if chain and chain[0].sequence == 0 and chain[0].previous_hash != GENESIS:
        faults.append(_reordered(chain[0], None, owner))
    for before, row in pairwise(chain):
        if row.sequence == before.sequence:
            faults.append(_forked(row))
        elif row.sequence > before.sequence + 1:
            faults.append(_missing(before.sequence + 1, row.sequence))
        elif row.previous_hash != before.row_hash and before.is_whole and row.is_whole:
            # A row whose own hash is broken has been named already, with what follows from it.
            faults.append(_reordered(row, before, owner))
    if expected_head is not None and expected_head not in owner:
        last = chain[-1].sequence if chain else -1
        faults.append(
            Fault(
                kind=FaultKind.CUT,
                sequence=last + 1,
                sentence=f"no row has the expected hash {expected_head[:12]}...: rows behind {last} were "
                "cut off, or the chain was written anew",
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.sequence))


def _changed(row: Link) -> Fault:
    return Fault(
        kind=FaultKind.CHANGED,
        sequence=row.sequence,
        sentence=f"row {row.sequence} ({row.event}, version {row.version}) was changed: its columns give "
        f"hash {row.content_hash[:12]}..., it says {row.row_hash[:12]}...",
    )


def _missing(first: int, end: int) -> Fault:
    what = f"row {first} is" if end == first + 1 else f"rows {first} to {end - 1} are"
    return Fault(kind=FaultKind.MISSING, sequence=first, sentence=f"{what} missing")


def _forked(row: Link) -> Fault:
    return Fault(
        kind=FaultKind.FORKED,
        sequence=row.sequence,
        sentence=f"row {row.sequence} is there more than once, with different content: two writers at the "
        "same time, or a row that was slipped in",
    )


def _reordered(row: Link, before: Link | None, owner: dict[str, Link]) -> Fault:
    follows = owner.get(row.previous_hash)
    place = "at the start" if before is None else f"behind row {before.sequence}"
    if follows is not None:
        told = f"it was written behind row {follows.sequence}"
    elif row.previous_hash == GENESIS:
        told = "it was written as the first row"
    else:
        told = (
            f"the row that it was written behind ({row.previous_hash[:12]}...) is not in the chain any more"
        )
    return Fault(
        kind=FaultKind.REORDERED,
        sequence=row.sequence,
        sentence=f"row {row.sequence} ({row.event}, version {row.version}) does not belong {place}: {told}",
    )
