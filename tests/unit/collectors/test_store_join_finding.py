"""Finding steps by when they were stored, and counts that wait for their map. Pure, over a store made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ledger_builders import placement
from moetrace_collectors.ledger.epochs import epoch_map
from moetrace_collectors.model import ExpertCounts
from moetrace_collectors.store_clock import HOUR_MS
from moetrace_collectors.store_join import queries
from moetrace_collectors.store_join.folding import folded, late_counts
from moetrace_collectors.store_join.step_finder import (
    RECENT_MS,
    WRITTEN_BEFORE_MS,
    WRITTEN_EVERY_MS,
    Found,
    StepFinder,
)
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.enums import COUNT_KIND_CODE, CountIds, CountKind

TIMEOUT_MS = 10_000


@dataclass
class FakeStore:
    """Rank steps of a world of two by when they were stored; counts what it is asked."""

    stored: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, rank, stored ms)"""
    judged: set[int] = field(default_factory=set)
    expired: set[int] = field(default_factory=set)
    """Steps whose arrivals are there, and whose rows are not."""
    hidden: set[int] = field(default_factory=set)
    """Steps whose arrivals the replica that is asked does not show."""
    named: list[tuple[str, list[int]]] = field(default_factory=list)
    """(query, steps) of each question that names steps."""
    windows_ms: list[int] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    """(step, received ms) of whole steps that have no arrivals."""
    num_by_collectors: int = 0
    """How often it was asked for them."""

    def ask(self, sql: str, parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Rows of a query."""
        if sql == queries.WRITTEN:
            self.num_by_collectors += 1
            return [
                {"run_id": "r", "step": step, "first_ms": at_ms, "last_ms": at_ms}
                for step, at_ms in self.written
                if at_ms >= parameters["since_ms"]
            ]
        if sql == queries.ARRIVED:
            since_ms = parameters["since_ms"]
            self.windows_ms.append(since_ms)
            times: dict[int, list[int]] = {}
            for step, _, stored_ms in self.stored:
                if stored_ms >= since_ms and step not in self.hidden:
                    times.setdefault(step, []).append(stored_ms)
            ranks = {(step, rank) for step, rank, stored_ms in self.stored if stored_ms >= since_ms}
            arrivals = {step: sum(one == step for one, _ in ranks) for step in times}
            return [
                {"run_id": "r", "step": step, "arrivals": arrivals[step], "first_ms": min(at),
                 "last_ms": max(at)}
                for step, at in times.items()
            ]  # fmt: skip
        name = {queries.JUDGED: "judged", queries.STEPS: "steps", queries.EXECUTED_AGAIN: "again"}[sql]
        asked = parameters["steps"]
        self.named.append((name, asked))
        if name == "judged":
            return [{"step": step} for step in asked if step in self.judged]
        if name == "again":
            return []
        ranks = {step: {rank for one, rank, _ in self.stored if one == step} for step in asked}
        ranks |= {step: {0, 1} for step, _ in self.written if step in asked}
        ranks = {step: there for step, there in ranks.items() if step not in self.expired}
        whole = {"world_size": 2, "world_sizes": 1, "num_microbatches": 1}
        return [{"step": step, "records": len(there), **whole} for step, there in ranks.items()]


def finder(store: FakeStore) -> StepFinder:
    """A finder that looks back a day at first."""
    return StepFinder(store.ask, timeout_ms=TIMEOUT_MS, look_back_hours=24.0, run_id="")


def look(store: FakeStore, finding: StepFinder, now_ms: int) -> Found:
    """One look after which all that has closed is judged."""
    found = finding.look(now_ms, remember=False)
    finding.done((step.run_id, step.step) for step in found.closed)
    finding.done(found.grown)
    store.judged |= {step.step for step in found.closed}
    finding.turned()
    return found


def test_a_look_names_only_steps_with_new_rows() -> None:
    """However many lie in the window: what is done is not asked about again."""
    start_ms = 100 * HOUR_MS
    store = FakeStore(stored=[(step, rank, start_ms + step) for step in range(500) for rank in range(2)])
    finding = finder(store)
    assert len(look(store, finding, start_ms + 1_000).closed) == 500
    store.named.clear()
    store.stored += [(500, rank, start_ms + 1_500) for rank in range(2)]
    assert [step.step for step in look(store, finding, start_ms + 2_000).closed] == [500]
    assert store.named == [("judged", [500]), ("again", [500]), ("steps", [500])]
    store.named.clear()
    assert look(store, finding, start_ms + 3_000).closed == ()
    assert store.named == []
    assert store.windows_ms[2] == start_ms + 2_000 - RECENT_MS - 2 * TIMEOUT_MS


def test_rows_behind_a_verdict_are_told_until_they_are_dealt_with() -> None:
    """A step that was judged without a rank has grown when the rank's rows come."""
    start_ms = 100 * HOUR_MS
    store = FakeStore(stored=[(1, 0, start_ms)])
    finding = finder(store)
    assert [step.step for step in look(store, finding, start_ms + TIMEOUT_MS).closed] == [1]
    store.stored.append((1, 1, start_ms + TIMEOUT_MS))
    for _ in range(2):
        found = finding.look(start_ms + TIMEOUT_MS + 500, remember=False)
        assert (found.grown, found.closed) == ((("r", 1),), ())
    finding.done(found.grown)
    assert look(store, finding, start_ms + TIMEOUT_MS + 1_000).grown == ()


def test_rows_behind_a_verdict_are_told_however_late() -> None:
    """After the step has left the window, to another process, and where the store merged a resend."""
    start_ms = 100 * HOUR_MS
    judged_ms = start_ms + TIMEOUT_MS
    store = FakeStore(stored=[(1, 0, start_ms)])
    finding = finder(store)
    assert [step.step for step in look(store, finding, judged_ms).closed] == [1]
    for minute in range(1, 20):
        assert look(store, finding, judged_ms + minute * 60_000).grown == ()
    store.stored.append((1, 1, judged_ms + 20 * 60_000))
    for who in (finding, finder(store)):
        found = look(store, who, judged_ms + 20 * 60_000 + 500)
        assert (found.grown, found.closed) == ((("r", 1),), ())
    merged = FakeStore(stored=[(1, 0, start_ms), (1, 0, start_ms + 100)])
    finding = finder(merged)
    look(merged, finding, judged_ms)
    merged.stored = [(1, 0, start_ms)]
    assert look(merged, finding, judged_ms + 500).grown == ()
    merged.stored.append((1, 1, judged_ms + 1_000))
    assert look(merged, finding, judged_ms + 2_000).grown == (("r", 1),)


def test_an_open_step_is_waited_for_beyond_the_window() -> None:
    """It closes by timeout, also when the store has been asked about other times since."""
    start_ms = 100 * HOUR_MS
    store = FakeStore(stored=[(1, 0, start_ms)])
    finding = StepFinder(store.ask, timeout_ms=4 * HOUR_MS, look_back_hours=1.0, run_id="")
    for hours in range(4):
        if hours == 3:
            # One more microbatch of the same rank.
            store.stored.append((1, 0, start_ms + hours * HOUR_MS))
        assert look(store, finding, start_ms + hours * HOUR_MS).closed == ()
    [closed] = look(store, finding, start_ms + 4 * HOUR_MS).closed
    assert (closed.step, closed.closed_ms) == (1, start_ms + 4 * HOUR_MS)


def test_a_step_whose_rows_have_gone_is_not_waited_for_for_ever() -> None:
    """A replica may lag as long as the step is in the window; after that nothing is asked about it."""
    start_ms = 100 * HOUR_MS
    store = FakeStore(stored=[(1, 0, start_ms)], expired={1})
    finding = finder(store)
    for minute in range(20):
        look(store, finding, start_ms + minute * 60_000)
    store.named.clear()
    look(store, finding, start_ms + 20 * 60_000)
    assert store.named == []


def test_a_step_is_not_judged_again_where_a_replica_lags() -> None:
    """One replica does not show its rows for a moment, and the next one not its verdict."""
    start_ms = 100 * HOUR_MS
    store = FakeStore(stored=[(1, rank, start_ms) for rank in range(2)])
    finding = finder(store)
    assert [step.step for step in look(store, finding, start_ms + 100).closed] == [1]
    store.hidden = {1}
    assert look(store, finding, start_ms + 200).closed == ()
    store.hidden, store.judged = set(), set()
    assert look(store, finding, start_ms + 300).closed == ()
    for hours in (1, 2):
        look(store, finding, start_ms + hours * HOUR_MS)
    assert finding.num_remembered == 0, "what has left the window is forgotten"


def test_a_step_that_closed_is_found_until_it_is_judged() -> None:
    """It has left the window, and the turn in which it closed came to nothing."""
    start_ms = 100 * HOUR_MS
    store = FakeStore(stored=[(1, 0, start_ms)])
    finding = StepFinder(store.ask, timeout_ms=4 * HOUR_MS, look_back_hours=1.0, run_id="")
    assert look(store, finding, start_ms).closed == ()
    for _ in range(2):
        found = finding.look(start_ms + 5 * HOUR_MS, remember=False)
        assert [step.step for step in found.closed] == [1]
    assert [step.step for step in look(store, finding, start_ms + 5 * HOUR_MS).closed] == [1]
    assert look(store, finding, start_ms + 5 * HOUR_MS).closed == ()


def test_a_clock_that_is_put_back_does_not_hold_up_a_step() -> None:
    """It is waited for from the new time on, and rows by the new time are found from the next look on."""
    start_ms = 100 * HOUR_MS
    store = FakeStore(stored=[(1, 0, start_ms)])
    finding = finder(store)
    assert look(store, finding, start_ms).closed == ()
    back_ms = start_ms - 3 * HOUR_MS
    store.stored += [(2, rank, back_ms) for rank in range(2)]
    assert look(store, finding, back_ms).closed == ()
    found = look(store, finding, back_ms + TIMEOUT_MS)
    assert sorted(step.step for step in found.closed) == [1, 2]


def test_steps_of_a_collector_without_arrivals_are_found_while_the_join_runs() -> None:
    """In a rolling upgrade an older one is at work; each step is judged once, the store seldom asked."""
    store = FakeStore()
    finding = finder(store)
    start_ms = 100 * HOUR_MS
    look(store, finding, start_ms)
    judged: list[int] = []
    for second in range(1, 1_200):
        now_ms = start_ms + 1_000 * second
        if second % 10 == 0:
            store.written.append((second, now_ms))
        judged += [step.step for step in look(store, finding, now_ms).closed]
    found_before_s = (1_200 // 300) * 300 - 300 - WRITTEN_BEFORE_MS // 1_000
    assert judged == sorted(set(judged))
    assert set(judged) >= set(range(10, found_before_s, 10))
    assert store.num_by_collectors <= 1 + 1_200_000 // WRITTEN_EVERY_MS


def test_steps_of_a_collector_that_joins_are_left_to_it() -> None:
    """Its verdicts come behind its rows: half a minute later they are not this one's to judge."""
    store = FakeStore()
    finding = finder(store)
    start_ms = 100 * HOUR_MS
    look(store, finding, start_ms)
    for second in range(1, 1_200):
        now_ms = start_ms + 1_000 * second
        store.written.append((second, now_ms))
        store.judged.add(second - 30)
        assert look(store, finding, now_ms).closed == ()
    assert finding.num_remembered <= (RECENT_MS + 2 * TIMEOUT_MS) // 1_000 + 1


def test_counts_that_were_written_before_the_verdict_are_counted_once() -> None:
    """A process that ended between the two has left them in both tables, maybe before there was a map."""
    kind = COUNT_KIND_CODE[CountKind.ROUTED]
    slots = ExpertCounts(layer=0, kind=kind, counts=np.array([1, 2, 3, 4]))
    logical = ExpertCounts(layer=0, kind=kind, counts=np.array([5, 2, 3]))
    other = ExpertCounts(layer=1, kind=kind, counts=np.array([7]))
    maps = {2: epoch_map(placement(((0, 1, 2, 0),), ranks=2), CountIds.PHYSICAL)}
    rank_step = replace(
        SyntheticRun(world_size=1).step(0)[0],
        placement_version=2,
        experts=(logical, other),
        unfolded=(slots,),
    )
    for written in (logical, slots):
        both = replace(rank_step, experts=(written, other))
        assert folded(both, maps).experts == (written, other)
        assert late_counts(both, maps) is None
    missing = replace(rank_step, experts=(other,))
    found = folded(missing, maps)
    assert [(entry.layer, entry.counts.tolist()) for entry in found.experts] == [(1, [7]), (0, [5, 2, 3])]
    late = late_counts(missing, maps)
    assert late is not None
    assert [entry.counts.tolist() for entry in late.experts] == [[5, 2, 3]]
    assert late_counts(found, maps) is None
