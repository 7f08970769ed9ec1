"""Costs by hand: experts' time, exchanges, copies per node, migration, memory."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.coactivation import count_coactivation
from moetrace_collectors.load.expert_map import Placement, contiguous_placement
from moetrace_collectors.load.series import GemmSamples
from moetrace_collectors.placement.memory import MemoryBudget
from moetrace_collectors.placement.migration import migration, rename_ranks
from moetrace_collectors.placement.step_cost import (
    Basis,
    Copies,
    GemmTime,
    StepCost,
    fit_gemm,
    intake_parts,
    union,
)
from moetrace_collectors.placement.topology import Topology

GEMM = GemmTime(start_us=10.0, us_per_row=0.5, basis=Basis.GIVEN)


def cost(*, ranks: int, nodes: int = 1, copies: Copies = Copies.PAIR, top_k: int | None = None) -> StepCost:
    """Round speeds: 1 byte per microsecond between nodes, 10 inside."""
    topology = Topology(num_ranks=ranks, num_nodes=nodes, node_gb_per_s=10e-3, link_gb_per_s=1e-3)
    return StepCost(topology=topology, gemm=GEMM, row_bytes=2.0, copies=copies, top_k=top_k)


def test_a_step_waits_for_its_fullest_rank_and_its_slowest_exchange() -> None:
    """Ranks get 30 and 10 rows: 10 + 0.5 x 30 us, and twice 30 x 2 bytes, half from the other rank."""
    loads = np.array([[30.0, 10.0]])
    placement = contiguous_placement(num_layers=1, num_experts=2, num_slots=2, num_ranks=2)
    assert cost(ranks=2).step_us(loads, placement.share).tolist() == [25.0 + 2 * 30 * 2 / 2 / 10]
    # On a node of its own each rank has the network alone, which is the slower way.
    assert cost(ranks=2, nodes=2).step_us(loads, placement.share).tolist() == [25.0 + 2 * 30 * 2 / 2 / 1]


def test_layers_without_rows_take_no_time() -> None:
    """No rows, no kernel."""
    placement = contiguous_placement(num_layers=1, num_experts=2, num_slots=2, num_ranks=2)
    assert cost(ranks=2).step_us(np.zeros((1, 2)), placement.share).tolist() == [0.0]


def test_groups_of_ranks_share_the_rows() -> None:
    """Counts summed over two groups are twice what one group works on."""
    placement = contiguous_placement(num_layers=1, num_experts=2, num_slots=2, num_ranks=2)
    single = cost(ranks=2)
    double = StepCost(topology=single.topology, gemm=GEMM, row_bytes=2.0, copies=Copies.PAIR, num_groups=2)
    loads = np.array([[30.0, 10.0]])
    assert double.step_us(2.0 * loads, placement.share) == pytest.approx(
        single.step_us(loads, placement.share)
    )


def test_one_copy_per_node_saves_what_partners_share() -> None:
    """Two tokens with experts {0, 1}, two with {2, 3}: on a node each, every token is one copy, not two."""
    routes = np.array([[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]])
    pairs = count_coactivation(routes, num_experts=4)
    loads = np.full((1, 4), 2.0)
    together = contiguous_placement(num_layers=1, num_experts=4, num_slots=4, num_ranks=4)
    apart = Placement(physical_to_logical=np.array([[0, 2, 1, 3]]), num_experts=4, num_ranks=4)
    model = cost(ranks=4, nodes=2, copies=Copies.NODE, top_k=2)
    # 2 copies of 2 bytes per node, half of them from the other node, over two ranks' links.
    assert model.transfer_us(loads, together.share, pairs).tolist() == [2 * 2 / 2 / 2]
    assert model.transfer_us(loads, apart.share, pairs).tolist() == [4 * 2 / 2 / 2]
    plain = cost(ranks=4, nodes=2, copies=Copies.PAIR, top_k=2)
    assert plain.transfer_us(loads, together.share, pairs) == pytest.approx(
        plain.transfer_us(loads, apart.share, pairs)
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=20))
def test_pairs_bound_the_union_from_below(tokens: list[set[int]]) -> None:
    """Dawson and Sankoff: never above the tokens that touch a node; exact where all have equally many."""
    single = float(sum(len(token) for token in tokens))
    double = float(sum(len(list(combinations(token, 2))) for token in tokens))
    bound = float(union(np.array(single), np.array(double)))
    assert bound <= len(tokens) + 1e-9
    if len({len(token) for token in tokens}) == 1:
        assert bound == pytest.approx(len(tokens))


def test_copies_without_coactivation_count_as_independent() -> None:
    """All pairs to one node: one copy per token; spread evenly over two: 1 - (1/2)^k tokens each."""
    loads = np.ones((1, 4))
    everything = np.ones((1, 4, 1))
    assert intake_parts(everything, loads, None, 4).tolist() == [[0.25]]
    halves = np.full((1, 4, 2), 0.5)
    assert intake_parts(halves, loads, None, 2)[0] == pytest.approx([0.75, 0.75])
    assert intake_parts(halves, loads, None, None).tolist() == [[1.0, 1.0]]


def test_experts_time_is_fitted_through_outliers() -> None:
    """A tenth of the samples is twice as slow: the line is that of the others."""
    random = np.random.default_rng(0)
    rows = random.uniform(500, 5000, 400)
    times = 30.0 + 0.06 * rows + random.normal(0.0, 1.0, 400)
    times[::10] *= 2.0
    fitted = fit_gemm(GemmSamples(rows=rows, microseconds=times))
    assert fitted is not None
    assert fitted.basis is Basis.FITTED
    assert fitted.us_per_row == pytest.approx(0.06, rel=0.03)
    assert fitted.start_us == pytest.approx(30.0, abs=10.0)


@pytest.mark.parametrize(
    ("rows", "times"),
    [
        (np.full(100, 50.0), np.full(100, 9.0)),
        (np.arange(1.0, 5.0), np.arange(1.0, 5.0)),
        (np.arange(1.0, 101.0), np.full(100, np.inf)),
    ],
)
def test_samples_that_tell_no_line_give_none(rows: np.ndarray, times: np.ndarray) -> None:
    """Equal rows, too few samples, broken times: nothing is made up."""
    assert fit_gemm(GemmSamples(rows=rows, microseconds=times)) is None


def test_migration_counts_what_ranks_must_fetch() -> None:
    """One expert from the same node, three from the other; a second replica of one's own is free."""
    today = Placement(physical_to_logical=np.array([[0, 1, 2, 3]]), num_experts=4, num_ranks=4)
    wider = Placement(physical_to_logical=np.array([[0, 1, 2, 3, 2, 2, 3, 0]]), num_experts=4, num_ranks=4)
    topology = Topology(num_ranks=4, num_nodes=2, node_gb_per_s=10.0, link_gb_per_s=1.0)
    found = migration(today, wider, topology=topology, expert_bytes=1e9)
    # rank 0: 0,1 rank 1: 2,3 rank 2: 2 twice rank 3: 3,0. Fetched: 1 (near); 2, 3 (far); nothing; 0 (far).
    assert found.copies == 4
    assert found.bytes == 4e9
    assert found.seconds == pytest.approx(2.0)
    nothing = migration(today, today, topology=topology, expert_bytes=1e9)
    assert (nothing.copies, nothing.seconds) == (0, 0.0)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2]), st.integers(0, 2**32 - 1))
def test_renaming_ranks_changes_no_load(nodes: int, seed: int) -> None:
    """The same rank loads in another order, the same experts per node, and never more copies to fetch."""
    random = np.random.default_rng(seed)
    slots = np.stack([random.permutation(np.arange(12) % 8) for _ in range(3)])
    planned = Placement(physical_to_logical=slots, num_experts=8, num_ranks=4)
    today = Placement(
        physical_to_logical=np.stack([random.permutation(8) for _ in range(3)]), num_experts=8, num_ranks=4
    )
    renamed = rename_ranks(planned, today, num_nodes=nodes)
    loads = random.integers(0, 99, (3, 8)).astype(np.float64)
    assert np.sort(renamed.rank_loads(loads), axis=1) == pytest.approx(
        np.sort(planned.rank_loads(loads), axis=1)
    )
    by_node = [
        np.sort(map_.rank_loads(loads).reshape(3, nodes, -1).sum(axis=2), axis=1)
        for map_ in (renamed, planned)
    ]
    assert by_node[0] == pytest.approx(by_node[1])


def test_memory_says_what_fits() -> None:
    """10 GB less 4 for the cache, 2 layers of experts of 1 GB: three slots."""
    budget = MemoryBudget(memory_gb=10.0, reserved_gb=4.0, expert_bytes=1e9, num_layers=2)
    assert budget.most_slots_per_rank == 3
    assert budget.fits(3)
    assert not budget.fits(4)
    budget.check(num_slots=12, num_ranks=4, num_experts=8)
    with pytest.raises(UsageError) as caught:
        budget.check(num_slots=16, num_ranks=4, num_experts=8)
    assert "slots = 16 need 8.0 GB per rank" in str(caught.value)
    assert "give --slots 12 or fewer" in str(caught.value)
    with pytest.raises(UsageError, match="16 experts do not fit on 4 ranks at all"):
        budget.check(num_slots=16, num_ranks=4, num_experts=16)
    assert MemoryBudget(memory_gb=None, reserved_gb=0.0, expert_bytes=1e9, num_layers=2).fits(10**9)
    with pytest.raises(UsageError, match="nothing is left for experts"):
        MemoryBudget(memory_gb=4.0, reserved_gb=4.0, expert_bytes=1.0, num_layers=1)


@pytest.mark.parametrize("field", ["node_gb_per_s", "link_gb_per_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_speeds_must_be_speeds(field: str, value: float) -> None:
    """Zero, negative, NaN and infinite speeds are refused by name."""
    with pytest.raises(UsageError, match=field):
        Topology(num_ranks=2, **{field: value})
