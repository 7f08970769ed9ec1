"""Placements as maps, as files, and what they make of expert loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.expert_map import Placement, contiguous_placement
from moetrace_collectors.load.placement_file import read_placement, write_placement


def placement(slots: list[list[int]], *, experts: int, ranks: int) -> Placement:
    """A placement from lists."""
    return Placement(physical_to_logical=np.array(slots), num_experts=experts, num_ranks=ranks)


def test_replicas_share_a_load_and_empty_slots_take_none() -> None:
    """Expert 0 has two replicas on ranks 0 and 1; rank 1 has an empty slot."""
    map_ = placement([[0, 1, 0, -1]], experts=2, ranks=2)
    loads = np.array([[10.0, 4.0]])
    assert map_.replica_counts.tolist() == [[2, 1]]
    assert map_.rank_loads(loads).tolist() == [[9.0, 5.0]]
    assert map_.slot_loads(loads).tolist() == [[5.0, 4.0, 5.0, 0.0]]
    assert map_.rank_loads(np.stack([loads, 2 * loads])).tolist() == [[[9.0, 5.0]], [[18.0, 10.0]]]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_no_load_is_lost(ranks: int, per_rank: int, layers: int, seed: int) -> None:
    """Any placement: rank loads and slot loads sum to expert loads."""
    random = np.random.default_rng(seed)
    slots = ranks * per_rank
    experts = int(random.integers(1, slots + 1))
    rows = [
        random.permutation(
            np.concatenate([np.arange(experts), random.integers(-1, experts, slots - experts)])
        )
        for _ in range(layers + 1)
    ]
    map_ = Placement(physical_to_logical=np.array(rows), num_experts=experts, num_ranks=ranks)
    loads = random.integers(0, 1000, (layers + 1, experts)).astype(np.float64)
    assert map_.rank_loads(loads).sum(axis=1) == pytest.approx(loads.sum(axis=1))
    assert map_.slot_loads(loads).reshape(layers + 1, ranks, -1).sum(axis=2) == pytest.approx(
        map_.rank_loads(loads)
    )


@pytest.mark.parametrize(
    ("slots", "experts", "ranks", "message"),
    [
        ([[0, 1, 2]], 3, 2, "slots = 3 do not divide by ranks = 2: every rank has equally many, so give 4"),
        ([[0, 1]], 3, 1, "slots = 2 are fewer than 3 experts: every expert needs a slot, so give at least 3"),
        ([[0, 1, 1, 3]], 3, 2, "layer 0 slot 3 holds expert 3: experts are 0 to 2 (-1 for an empty slot)"),
        ([[0, 1, 1, -2]], 3, 2, "layer 0 slot 3 holds expert -2"),
        ([[0, 1, 2], [0, 0, 2]], 3, 3, "layer 1 has no slot for expert 1: every expert needs one at least"),
    ],
)
def test_impossible_placements_are_named(
    slots: list[list[int]], experts: int, ranks: int, message: str
) -> None:
    """One line with the field, its value and the fix."""
    with pytest.raises(UsageError) as caught:
        placement(slots, experts=experts, ranks=ranks)
    assert message in str(caught.value)


def test_contiguous_begins_again_at_expert_0() -> None:
    """Slots past the experts hold second replicas in order."""
    map_ = contiguous_placement(num_layers=2, num_experts=4, num_slots=6, num_ranks=2)
    assert map_.physical_to_logical.tolist() == [[0, 1, 2, 3, 0, 1]] * 2


def test_a_written_placement_is_read_back(tmp_path: Path) -> None:
    """What replay writes, load reads."""
    map_ = placement([[0, 1, 0, 2], [2, 1, 0, 1]], experts=3, ranks=2)
    path = tmp_path / "placement.json"
    write_placement(path, map_, layers=[3, 7])
    again = read_placement(path, num_experts=3, num_ranks=None)
    assert again.physical_to_logical.tolist() == map_.physical_to_logical.tolist()
    assert again.num_ranks == 2


@pytest.mark.parametrize(
    "document",
    [
        {"physical_to_logical_map": [[0, 1, 2, 3]], "ranks": 2},
        {"phy2log": [0, 1, 2, 3], "num_ranks": 2},
        {"expert_ranks": [[0, 0, 1, 1]], "ranks": 2},
        [[0, 1, 2, 3]],
    ],
)
def test_placements_of_others_are_read(tmp_path: Path, document: object) -> None:
    """Slot maps and rank maps under the names that engines use."""
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(document))
    map_ = read_placement(path, num_experts=4, num_ranks=2)
    assert map_.rank_loads(np.array([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[3.0, 7.0]]


@pytest.mark.parametrize(
    ("document", "ranks", "message"),
    [
        ({"expert_ranks": [[0, 0, 1, 2]], "ranks": 2}, None, "puts expert 3 on rank 2: ranks are 0 to 1"),
        ({"physical_to_logical": [[0, 1, 2, 3]], "ranks": 2}, 4, "placement is of 2 ranks, --ranks says 4"),
        ([[0, 1, 2, 3]], None, "does not tell its ranks: give --ranks"),
        ({"map": []}, 2, "one of physical_to_logical"),
        ({"physical_to_logical": [[0, 1, 2, "x"]], "ranks": 2}, None, "whole numbers"),
        (
            {"physical_to_logical": [[0, 1, 2, 3]], "ranks": "two"},
            None,
            "ranks: a whole number expected, got 'two'",
        ),
    ],
)
def test_broken_placement_files_are_named(
    tmp_path: Path, document: object, ranks: int | None, message: str
) -> None:
    """File, place, and what was expected there."""
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError) as caught:
        read_placement(path, num_experts=4, num_ranks=ranks)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
