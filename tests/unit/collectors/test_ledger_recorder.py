"""What becomes of announced placements: ledger rows with their diff, once each, linked to what ran."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger_builders import EVEN, SWAPPED, MemoryLedger, placement, report
from moetrace_collectors.ledger.chain import link, verify_links
from moetrace_collectors.ledger.recorder import Outcome, Recorder
from moetrace_collectors.ledger.transition import MemoryCheck, check_memory, mapping_change, needed_bytes
from moetrace_schemas.enums import PlacementEvent
from moetrace_schemas.placement import PlacementMap, PlacementTerms


def recorder() -> tuple[Recorder, MemoryLedger]:
    """A recorder on an empty ledger; time moves by a millisecond."""
    store = MemoryLedger()
    clock = itertools.count(1_900_000_000_000)
    return Recorder(store, unix_ms=lambda: next(clock)), store


def test_a_change_is_recorded_with_what_it_takes() -> None:
    """Window, policy, who, thresholds, rollback target, memory, migration plan and digests are in the row."""
    ledger, store = recorder()
    ledger.record(report(1, EVEN))
    outcome, row = ledger.record(
        report(
            2,
            SWAPPED,
            step=40,
            policy_version="greedy-3",
            proposed_by="balancer",
            window=(0, 39),
            max_slowdown=0.05,
            expert_bytes=1000,
            memory_bytes=4000,
            weight_digests={"layer0.expert0": "ab" * 32},
        )
    )
    assert outcome is Outcome.RECORDED
    assert row is not None
    assert (row.event, row.version, row.previous_version, row.rollback_version, row.step) == (
        "announced", 2, 1, 1, 40,
    )  # fmt: skip
    assert (row.experts_copied, row.copied_bytes, row.replicas_added) == (2, 2000, 0)
    assert (row.memory, row.policy_version, row.proposed_by) == ("fits", "greedy-3", "balancer")
    document: dict[str, Any] = json.loads(row.document)
    assert document["migration"]["moves"] == [[0, 0, 1], [0, 2, 0]]
    assert document["migration"]["copies_by_rank"] == [1, 1, 0, 0]
    assert document["terms"]["telemetry_window"] == [0, 39]
    assert document["terms"]["max_slowdown"] == 0.05
    assert document["terms"]["weight_digests"] == {"layer0.expert0": "ab" * 32}
    assert document["memory"] == {
        "result": "fits", "expert_bytes": 1000, "available_bytes": 4000, "needed_bytes": 4000,
    }  # fmt: skip
    assert document["placement"]["physical_to_logical"] == [list(layer) for layer in SWAPPED]
    assert verify_links(map(link, store.rows)) == ()


def test_a_mapping_is_recorded_once() -> None:
    """Every rank may send it, and senders repeat: digest and version say that it is the same."""
    ledger, store = recorder()
    outcomes = [ledger.record(report(1, EVEN))[0] for _ in range(3)]
    assert outcomes == [Outcome.RECORDED, Outcome.REPEATED, Outcome.REPEATED]
    assert len(store.rows) == 1


def test_another_mapping_under_the_same_version_is_a_conflict() -> None:
    """An epoch has one mapping: counts under it would mean two things."""
    ledger, store = recorder()
    ledger.record(report(1, EVEN))
    assert ledger.record(report(1, SWAPPED)) == (Outcome.CONFLICTING, None)
    assert len(store.rows) == 1


def test_pipeline_stages_announce_their_own_layers() -> None:
    """Each is diffed against the same layers before, and together they are the epoch's mapping."""
    ledger, _ = recorder()
    for version, first in ((1, EVEN[0]), (2, SWAPPED[0])):
        ledger.record(report(version, (first,), layers=(0,)))
        ledger.record(report(version, (EVEN[1],), layers=(1,)))
    mapping = ledger.mapping("run", 2)
    assert mapping == placement(SWAPPED)
    outcome, row = ledger.record(report(3, EVEN))
    assert (outcome, row and row.experts_copied) == (Outcome.RECORDED, 2)


def test_a_proposal_is_not_in_force() -> None:
    """It is kept beside, and the next announcement is diffed against what really ran."""
    ledger, _ = recorder()
    ledger.record(report(1, EVEN))
    _, proposed = ledger.record(report(2, SWAPPED, event=PlacementEvent.PROPOSED))
    assert proposed is not None
    assert (proposed.event, proposed.step, proposed.experts_copied) == ("proposed", None, 2)
    _, announced = ledger.record(report(3, EVEN))
    assert announced is not None
    assert (announced.previous_version, announced.experts_copied) == (1, 0)


def test_after_a_rollback_the_next_change_starts_from_the_old_mapping() -> None:
    """A version that is applied again is in force, though another one was announced last."""
    ledger, store = recorder()
    ledger.record(report(1, EVEN))
    ledger.applied(run_id="run", version=1, step=0, num_ranks=4)
    ledger.record(report(2, SWAPPED))
    ledger.applied(run_id="run", version=2, step=10, num_ranks=4)
    rolled_back = ledger.applied(run_id="run", version=1, step=20, num_ranks=4)
    assert rolled_back is not None
    assert (rolled_back.previous_version, rolled_back.digest) == (2, placement(EVEN).digest())
    _, row = ledger.record(report(3, SWAPPED))
    assert row is not None
    assert (row.previous_version, row.experts_copied, row.rollback_version) == (1, 2, 1)
    assert verify_links(map(link, store.rows)) == ()


def test_an_epoch_begins_once() -> None:
    """Steps of it that close later, or steps of before that come late, begin nothing."""
    ledger, store = recorder()
    assert ledger.applied(run_id="run", version=1, step=5, num_ranks=4) is not None
    assert ledger.applied(run_id="run", version=1, step=6, num_ranks=4) is None
    assert ledger.applied(run_id="run", version=7, step=4, num_ranks=4) is None
    assert [row.event for row in store.rows] == ["applied"]


def test_runs_have_chains_of_their_own() -> None:
    """Numbers and links of one run do not depend on another."""
    ledger, store = recorder()
    for run_id in ("a", "b", "a"):
        ledger.record(report(len(store.rows), EVEN, run_id=run_id))
    assert [(row.run_id, row.sequence) for row in store.rows] == [("a", 0), ("b", 0), ("a", 1)]
    for run_id in ("a", "b"):
        assert verify_links(map(link, store.of_run(run_id))) == ()


def test_memory_counts_the_fullest_rank() -> None:
    """Empty slots weigh nothing; a rank with more experts than fit is found."""
    mapping = placement(((0, 1, 2, -1), (0, 1, 2, -1)), ranks=2)
    assert needed_bytes(mapping, 10) == 40
    assert check_memory(mapping, PlacementTerms(expert_bytes=10, memory_bytes=39)) is MemoryCheck.DOES_NOT_FIT
    assert check_memory(mapping, PlacementTerms(expert_bytes=10)) is MemoryCheck.UNKNOWN


@st.composite
def mappings(draw: st.DrawFn) -> PlacementMap:
    """4 experts on 8 slots of 4 ranks, 2 layers."""
    rows = []
    for _ in range(2):
        rest = draw(st.lists(st.integers(-1, 3), min_size=4, max_size=4))
        rows.append(tuple(draw(st.permutations([0, 1, 2, 3, *rest]))))
    return PlacementMap(layers=(0, 1), physical_to_logical=tuple(rows), num_experts=4, num_ranks=4)


@settings(deadline=None)
@given(mappings(), mappings())
def test_a_diff_is_what_it_says(before: PlacementMap, after: PlacementMap) -> None:
    """Copies are the (layer, expert, rank) that are new; nothing changes from a mapping to itself."""
    change = mapping_change(before, after)
    assert change is not None

    def held(mapping: PlacementMap) -> set[tuple[int, int, int]]:
        return {
            (layer, expert, slot // 2)
            for layer, row in zip(mapping.layers, mapping.physical_to_logical, strict=True)
            for slot, expert in enumerate(row)
            if expert >= 0
        }

    new = held(after) - held(before)
    assert change.moves is not None
    assert set(change.moves) == new
    assert change.experts_copied == len(new) == sum(change.copies_by_rank)
    filled = [sum(np.array(m.physical_to_logical).ravel() >= 0) for m in (before, after)]
    assert change.replicas_added == filled[1] - filled[0]
    same = mapping_change(after, after)
    assert same is not None
    assert (same.experts_copied, same.replicas_added) == (0, 0)


def test_mappings_of_other_shapes_are_not_compared() -> None:
    """Another number of ranks or experts is another job, not a migration."""
    assert mapping_change(placement(EVEN, ranks=4), placement(EVEN, ranks=2)) is None
