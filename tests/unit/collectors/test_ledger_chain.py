"""The hash chain: nothing can be changed, taken out or moved without being found and named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors.ledger.chain import Fault, FaultKind, LedgerRow, append, hash_row, link, verify_links

COLUMNS = {
    "time_unix_ms": 7,
    "event": "applied",
    "version": 99,
    "previous_version": 99,
    "rollback_version": 99,
    "step": 99,
    "digest": "f" * 64,
    "policy_version": "other",
    "proposed_by": "other",
    "memory": "fits",
    "experts_copied": 99,
    "copied_bytes": 99,
    "replicas_added": -99,
    "verdict": "accepted",
    "document": '{"placement":1}',
    "previous_hash": "a" * 64,
    "row_hash": "b" * 64,
}


def verify(rows: list[LedgerRow], *, expected_head: str | None = None) -> tuple[Fault, ...]:
    """Faults of rows that are whole in memory."""
    return verify_links([link(row) for row in rows], expected_head=expected_head)


def chain(length: int) -> list[LedgerRow]:
    """A sound chain."""
    rows: list[LedgerRow] = []
    for number in range(length):
        row = LedgerRow(
            run_id="run",
            sequence=0,
            time_unix_ms=1_900_000_000_000 + number,
            event="announced",
            version=number,
        )
        rows.append(append(rows[-1] if rows else None, row))
    return rows


@settings(deadline=None)
@given(st.integers(0, 8), st.randoms())
def test_a_sound_chain_has_no_fault(length: int, random: object) -> None:
    """In whatever order a store gives the rows, and with a row that a retry wrote twice."""
    rows = chain(length)
    shuffled = rows + rows[:1]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert verify(shuffled, expected_head=rows[-1].row_hash if rows else None) == ()


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("at", [0, 2, 4])
def test_every_changed_column_is_found_and_its_row_named(column: str, at: int) -> None:
    """No column is outside the hash."""
    rows = chain(5)
    rows[at] = replace(rows[at], **{column: COLUMNS[column]})
    faults = verify(rows)
    assert (FaultKind.CHANGED, at) in [(fault.kind, fault.sequence) for fault in faults]
    assert f"row {at} " in faults[0].sentence


@settings(deadline=None)
@given(st.integers(2, 8), st.data())
def test_a_missing_row_is_found_and_named(length: int, data: st.DataObject) -> None:
    """A row that was taken out leaves a hole; the last one is missed through its hash."""
    rows = chain(length)
    gone = data.draw(st.integers(0, length - 1))
    faults = verify(rows[:gone] + rows[gone + 1 :], expected_head=rows[-1].row_hash)
    kind = FaultKind.CUT if gone == length - 1 else FaultKind.MISSING
    assert [(fault.kind, fault.sequence) for fault in faults] == [(kind, gone)]


@settings(deadline=None)
@given(st.integers(2, 8), st.data())
def test_a_row_that_was_rewritten_with_a_new_hash_breaks_the_link_behind_it(
    length: int, data: st.DataObject
) -> None:
    """Whoever recomputes a row's hash must recompute all behind it, and then the noted head is gone."""
    rows = chain(length)
    at = data.draw(st.integers(0, length - 2))
    forged = replace(rows[at], version=77, row_hash="")
    rows[at] = replace(forged, row_hash=hash_row(forged))
    faults = verify(rows)
    assert [(fault.kind, fault.sequence) for fault in faults] == [(FaultKind.REORDERED, at + 1)]
    assert "is not in the chain any more" in faults[0].sentence


def test_a_chain_that_was_written_anew_lacks_the_noted_head() -> None:
    """A whole chain that is consistent in itself is still not the one that was noted."""
    noted = chain(3)[-1].row_hash
    rows: list[LedgerRow] = []
    for row in chain(3):
        rows.append(append(rows[-1] if rows else None, replace(row, version=5)))
    assert verify(rows) == ()
    assert [fault.kind for fault in verify(rows, expected_head=noted)] == [FaultKind.CUT]


def test_rows_that_changed_places_are_found() -> None:
    """Numbers are part of the hash; with new hashes the links tell."""
    rows = chain(4)
    swapped = [rows[0], replace(rows[2], sequence=1), replace(rows[1], sequence=2), rows[3]]
    assert {fault.kind for fault in verify(swapped)} == {FaultKind.CHANGED}
    rehashed = [replace(row, row_hash=hash_row(row)) for row in swapped]
    faults = verify(rehashed)
    assert {fault.kind for fault in faults} == {FaultKind.REORDERED}
    assert {fault.sequence for fault in faults} >= {1, 2}


def test_two_rows_of_one_number_are_a_fork() -> None:
    """Two collectors that appended at the same moment, or a row that was slipped in."""
    rows = chain(3)
    twin = append(rows[1], replace(rows[2], version=8))
    assert [(fault.kind, fault.sequence) for fault in verify([*rows, twin])] == [(FaultKind.FORKED, 2)]
