"""Our EPLB against the published examples: replica counts and rank loads, exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors.load.expert_map import Placement
from moetrace_collectors.placement.eplb import eplb_placement
from moetrace_collectors.placement.packing import pack, replicate

DATA = Path(__file__).parents[2] / "data"
CASES = json.loads((DATA / "placement" / "eplb_cases.json").read_text())
EDGES = {case["what"]: case for case in CASES["edge_cases"]}


def recorded() -> dict[str, tuple[np.ndarray, dict[str, Any]]]:
    """Loads and known results of real recordings, by name and sizes."""
    esft = json.loads((DATA / "loads" / "esft_law_expected.json").read_text())
    counts = json.loads((DATA / "loads" / "esft_law_counts.json").read_text())["counts"]
    models = json.loads((DATA / "loads" / "olmoe_mixtral_expected.json").read_text())
    loads = {"esft": np.array(counts, dtype=np.float64).sum(axis=0)}
    loads.update({name: np.array(value["counts"], dtype=np.float64) for name, value in models.items()})
    expected = {"esft": esft, **models}
    return {
        f"{name} {key}": (loads[name], value)
        for name, values in expected.items()
        for key, value in values.items()
        if key.startswith("eplb_rep")
    }


RECORDED = recorded()


def test_the_published_example() -> None:
    """12 experts in 4 groups, 16 slots, 2 nodes, 8 ranks: replica counts, and the loads of its own map."""
    case = CASES["readme_example"]
    loads = np.array(case["weight"], dtype=np.float64)
    planned = eplb_placement(
        loads,
        num_slots=case["num_replicas"],
        num_ranks=case["num_gpus"],
        num_nodes=case["num_nodes"],
        num_groups=case["num_groups"],
    )
    published = Placement(
        physical_to_logical=np.array(case["phy2log"]), num_experts=12, num_ranks=case["num_gpus"]
    )
    assert planned.replica_counts.tolist() == case["logcnt"]
    assert planned.rank_loads(loads).tolist() == published.rank_loads(loads).tolist()


@pytest.mark.parametrize("name", list(RECORDED))
def test_recorded_loads(name: str) -> None:
    """Real recordings, hierarchical and global: replica counts, and rank loads in any order of ranks."""
    loads, expected = RECORDED[name]
    sizes = re.search(r"rep(\d+)_grp(\d+)_node(\d+)_gpu(\d+)", name)
    assert sizes is not None
    slots, groups, nodes, ranks = (int(size) for size in sizes.groups())
    planned = eplb_placement(loads, num_slots=slots, num_ranks=ranks, num_nodes=nodes, num_groups=groups)
    assert planned.replica_counts.tolist() == expected["logcnt"]
    known = np.sort(np.array(expected["rank_loads"]), axis=1)
    assert np.sort(planned.rank_loads(loads), axis=1) == pytest.approx(known, abs=1e-9)


def test_equal_loads_are_balanced() -> None:
    """Every placement of equal loads is even."""
    case = EDGES["all loads equal: every placement is balanced"]
    loads = np.array(case["weight"], dtype=np.float64)
    planned = eplb_placement(loads, num_slots=8, num_ranks=4, num_nodes=1, num_groups=1)
    assert planned.rank_loads(loads).max() == case["expect_max_rank_load"]


def test_a_very_hot_expert_is_split() -> None:
    """One expert 1000 times hotter takes all spare slots, and its replicas split its load."""
    case = EDGES["one expert 1000 times hotter, replicas split its load"]
    loads = np.array(case["weight"], dtype=np.float64)
    planned = eplb_placement(loads, num_slots=8, num_ranks=4, num_nodes=1, num_groups=1)
    assert planned.replica_counts.tolist() == [[5, 1, 1, 1]]
    assert planned.rank_loads(loads).max() == pytest.approx(400.0)


def test_groups_that_do_not_divide_by_nodes_fall_back_to_global() -> None:
    """3 groups over 2 nodes: the same as without groups and nodes."""
    loads = np.random.default_rng(0).lognormal(0.0, 1.0, (4, 12))
    fallen_back = eplb_placement(loads, num_slots=16, num_ranks=4, num_nodes=2, num_groups=3)
    everywhere = eplb_placement(loads, num_slots=16, num_ranks=4, num_nodes=1, num_groups=1)
    assert fallen_back.physical_to_logical.tolist() == everywhere.physical_to_logical.tolist()


def test_groups_stay_on_one_node() -> None:
    """Hierarchical: all replicas of a group's experts are on the node of the group."""
    loads = np.random.default_rng(1).lognormal(0.0, 1.0, (3, 16))
    planned = eplb_placement(loads, num_slots=24, num_ranks=4, num_nodes=2, num_groups=4)
    node_of_slot = np.arange(24) // 12
    for layer in planned.physical_to_logical:
        for group in range(4):
            assert len(set(node_of_slot[layer // 4 == group].tolist())) == 1


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_replicas_go_where_they_lower_the_largest_most(experts: int, spare: int, seed: int) -> None:
    """No expert's replica carries more than any other would with one replica less."""
    loads = np.random.default_rng(seed).integers(1, 1000, (2, experts)).astype(np.float64)
    _, counts = replicate(loads, experts + spare)
    assert (counts.sum(axis=1) == experts + spare).all()
    largest = (loads / counts).max(axis=1, keepdims=True)
    before = np.where(counts > 1, loads / np.maximum(counts - 1, 1), np.inf)
    assert (before >= largest - 1e-9).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_packs_hold_equally_many(packs: int, room: int, seed: int) -> None:
    """Every item has its own place, and every pack as many as any other."""
    weights = np.random.default_rng(seed).integers(0, 9, (3, packs * room)).astype(np.float64)
    pack_of, place_of = pack(weights, packs)
    for layer in range(3):
        assert sorted((pack_of[layer] * room + place_of[layer]).tolist()) == list(range(packs * room))
