"""Counts of physical experts become logical ones under their own epoch, and never mix epochs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ledger_builders import placement, report
from moetrace_collectors.ledger.epochs import Epochs
from moetrace_collectors.model import ExpertCounts, JoinedStep
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.enums import COUNT_KIND_CODE, ClosedBy, CountIds, CountKind
from moetrace_schemas.placement import PlacementMap

FIRST = ((0, 1, 2, 3, 0, -1),)
SECOND = ((3, 2, 1, 0, 3, 3),)
SLOT_COUNTS = np.array([10, 20, 30, 40, 5, 0])


def joined(step: int, version: int, counts: np.ndarray = SLOT_COUNTS) -> JoinedStep:
    """One rank whose router counted slots of one layer."""
    rank_step = SyntheticRun(run_id="run", world_size=1, num_layers=1).step(step)[0]
    entries = (
        ExpertCounts(layer=0, kind=COUNT_KIND_CODE[CountKind.ROUTED], counts=counts),
        ExpertCounts(layer=0, kind=COUNT_KIND_CODE[CountKind.INVALID], counts=np.array([3])),
    )
    return JoinedStep(
        run_id="run",
        step=step,
        world_size=1,
        rank_steps=(replace(rank_step, placement_version=version, experts=entries),),
        missing_ranks=(),
        closed_by=ClosedBy.COMPLETE,
    )


def counts(step: JoinedStep) -> list[list[int]]:
    """All counts of its one rank."""
    return [entry.counts.tolist() for entry in step.rank_steps[0].experts]


def nothing(run_id: str, version: int) -> None:
    """A ledger without that mapping."""


def test_each_epoch_is_folded_with_its_own_mapping() -> None:
    """The same slots mean other experts before and after a change; totals stay what they are."""
    epochs = Epochs(nothing)
    epochs.learn(report(1, FIRST, ranks=2))
    epochs.learn(report(2, SECOND, ranks=2))
    assert counts(epochs.logical(joined(0, 1))) == [[15, 20, 30, 40], [3]]
    assert counts(epochs.logical(joined(1, 2))) == [[40, 30, 20, 15], [3]]


def test_counts_of_an_epoch_without_mapping_stay_as_they_are() -> None:
    """What cannot be told is not guessed from another epoch."""
    epochs = Epochs(nothing)
    epochs.learn(report(1, FIRST, ranks=2))
    step = joined(0, 9)
    assert epochs.logical(step) is step


def test_as_many_slots_as_experts_need_to_be_told() -> None:
    """Without replicas the length says nothing: logical unless the sender says physical."""
    permuted = ((2, 0, 3, 1),)
    four = np.array([1, 2, 3, 4])
    for told, expected in ((CountIds.LOGICAL, [1, 2, 3, 4]), (CountIds.PHYSICAL, [2, 4, 1, 3])):
        epochs = Epochs(nothing)
        epochs.learn(report(1, permuted, ranks=2, count_ids=told))
        assert counts(epochs.logical(joined(0, 1, four)))[0] == expected


def test_after_a_restart_the_ledger_is_asked_once() -> None:
    """A collector that did not hear the announcement knows the mapping all the same."""
    asked: list[tuple[str, int]] = []

    def load(run_id: str, version: int) -> tuple[PlacementMap, CountIds] | None:
        asked.append((run_id, version))
        return (placement(FIRST, ranks=2), CountIds.LOGICAL) if version == 1 else None

    epochs = Epochs(load)
    for step in range(3):
        assert counts(epochs.logical(joined(step, 1)))[0] == [15, 20, 30, 40]
        epochs.logical(joined(step, 2))
    assert asked == [("run", 1), ("run", 2)]


def test_stages_of_a_pipeline_add_up() -> None:
    """Each announces its own layers of the same version."""
    epochs = Epochs(nothing)
    epochs.learn(report(1, FIRST, ranks=2, layers=(5,)))
    epochs.learn(report(1, FIRST, ranks=2, layers=(0,)))
    assert counts(epochs.logical(joined(0, 1)))[0] == [15, 20, 30, 40]


# --- where the store joins: what is not known yet is not final -------------------------------------


def settled(epochs: Epochs, version: int) -> tuple[list[list[int]], list[list[int]]]:
    """Counts that are numbered by experts, and those that wait."""
    one = epochs.settled(joined(0, version).rank_steps[0])
    return [entry.counts.tolist() for entry in one.experts], [entry.counts.tolist() for entry in one.unfolded]


def test_counts_without_a_map_wait_and_totals_do_not() -> None:
    """A collector that hears of a placement later than others folds nothing by guess."""
    epochs = Epochs(nothing)
    assert settled(epochs, 1) == ([[3]], [[10, 20, 30, 40, 5, 0]])
    epochs.learn(report(1, FIRST, ranks=2))
    assert settled(epochs, 1) == ([[15, 20, 30, 40], [3]], [])
    assert settled(epochs, 0) == ([[10, 20, 30, 40, 5, 0], [3]], []), "no placement was named"


def test_a_map_is_asked_for_again_after_longer_waits() -> None:
    """What another collector writes into the ledger is found, and one that nobody writes costs little."""
    now, asked = [0], []
    ledger: dict[int, tuple[PlacementMap, CountIds]] = {}

    def load(run_id: str, version: int) -> tuple[PlacementMap, CountIds] | None:
        asked.append(now[0])
        return ledger.get(version)

    epochs = Epochs(load, clock_ns=lambda: now[0] * 1_000_000_000)
    for second in range(300):
        now[0] = second
        settled(epochs, 1)
        settled(epochs, 1)
    assert asked == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    ledger[1] = (placement(FIRST, ranks=2), CountIds.LOGICAL)
    now[0] = 303
    assert settled(epochs, 1) == ([[15, 20, 30, 40], [3]], [])
    assert settled(epochs, 1) == ([[15, 20, 30, 40], [3]], [])
    assert asked[10:] == [303], "what is known is not asked for"


def test_layers_of_another_stage_wait_for_its_map() -> None:
    """A mapping that one pipeline stage announced says nothing of the others' layers."""
    ledger = [placement(FIRST, ranks=2, layers=(5,))]
    now = [0]
    epochs = Epochs(lambda run, version: (ledger[0], CountIds.LOGICAL), clock_ns=lambda: now[0])
    assert settled(epochs, 1) == ([[3]], [[10, 20, 30, 40, 5, 0]])
    ledger[0] = placement((FIRST[0], FIRST[0]), ranks=2, layers=(0, 5))
    now[0] = 2_000_000_000
    assert settled(epochs, 1) == ([[15, 20, 30, 40], [3]], [])


def test_a_ledger_that_is_away_leaves_counts_waiting() -> None:
    """The rows go on; nothing is raised."""

    def away(run_id: str, version: int) -> None:
        raise OSError("no route to host")

    assert settled(Epochs(away), 1) == ([[3]], [[10, 20, 30, 40, 5, 0]])
