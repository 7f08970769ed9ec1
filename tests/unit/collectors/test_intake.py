"""The intake is bounded, and its ledger always adds up."""

from __future__ import annotations

from dataclasses import replace

from moetrace_collectors.events import Rejection
from moetrace_collectors.intake import MAX_WAITING_REJECTIONS, Intake, LedgerSnapshot
from moetrace_collectors.joiner import JoinCounts
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.enums import RejectReason

STEP = SyntheticRun(world_size=2, num_layers=1).step(0)
REJECTION = Rejection(reason=RejectReason.MALFORMED_REQUEST, detail="x")


def intake(*, max_requests: int = 10, max_bytes: int = 1_000) -> Intake:
    """An intake with a clock that stands still."""
    return Intake(max_requests=max_requests, max_bytes=max_bytes, clock_ns=lambda: 7)


def adds_up(ledger: LedgerSnapshot) -> bool:
    """Whether every rank step received has exactly one fate."""
    return ledger.received == (
        ledger.joined + ledger.late + ledger.duplicate + sum(ledger.rejected.values()) + ledger.pending
    )


def test_a_request_over_the_bound_is_not_taken_and_not_counted() -> None:
    """What is turned away with 'come back' leaves no trace in the ledger."""
    box = intake(max_requests=1)
    assert box.offer(STEP, (), size_bytes=1)
    assert not box.offer(STEP, (), size_bytes=1)
    assert (box.snapshot().received, box.snapshot().pending) == (2, 2)


def test_memory_is_bounded_but_one_large_request_passes() -> None:
    """A request larger than the whole budget is taken when it is alone, or it would never be."""
    box = intake(max_bytes=10)
    assert box.offer(STEP, (), size_bytes=1_000)
    assert not box.offer(STEP, (), size_bytes=1)
    box.take(timeout_s=0)
    assert box.offer(STEP, (), size_bytes=1)


def test_arrivals_come_out_in_order_and_stay_pending_until_settled() -> None:
    """Between queue and join window nothing is uncounted."""
    box = intake()
    box.offer(STEP, (REJECTION,), size_bytes=1)
    assert (box.snapshot().pending, adds_up(box.snapshot())) == (2, True)
    arrival = box.take(timeout_s=0)
    assert arrival is not None
    assert (arrival.rank_steps, arrival.rejections, arrival.arrived_ns) == (STEP, (REJECTION,), 7)
    assert (box.snapshot().pending, adds_up(box.snapshot())) == (2, True)
    box.settle(2, JoinCounts(received=2, joined=1, rejected=1))
    ledger = box.snapshot()
    assert (ledger.pending, ledger.joined, adds_up(ledger)) == (0, 1, True)
    assert ledger.rejected == {RejectReason.MALFORMED_REQUEST: 1, RejectReason.IDENTITY_MISMATCH: 1}


def test_rejections_are_counted_even_when_their_letters_do_not_fit() -> None:
    """A flood of bad requests costs bounded memory and loses no count."""
    box = intake()
    flood = (replace(REJECTION),) * (MAX_WAITING_REJECTIONS + 5)
    assert box.offer((), flood, size_bytes=1)
    assert box.take(timeout_s=0) is None
    assert (box.snapshot().received, adds_up(box.snapshot())) == (len(flood), True)


def test_a_closed_intake_takes_nothing_and_gives_what_it_has() -> None:
    """At shutdown what was acknowledged can still be taken out."""
    box = intake()
    box.offer(STEP, (), size_bytes=1)
    box.close()
    assert not box.offer(STEP, (), size_bytes=1)
    assert box.take(timeout_s=60) is not None
    assert box.take(timeout_s=60) is None
