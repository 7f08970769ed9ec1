"""Co-activation, communication and kernel shapes on cases small enough to count by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load import coactivation as module
from moetrace_collectors.load.coactivation import (
    apart_across,
    coactivation_of_matrix,
    count_coactivation,
    cross_node_share,
    top_pairs,
)
from moetrace_collectors.load.communication import (
    Communication,
    activated_experts,
    communication_through,
)
from moetrace_collectors.load.expert_map import Placement, contiguous_placement
from moetrace_collectors.load.kernel_shapes import kernel_shapes
from moetrace_collectors.load.routes_file import read_coactivation

ROUTES = np.array([[[0, 1], [2, 3]], [[0, 1], [0, 2]], [[0, 3], [1, -1]]])
"""3 tokens, 2 layers, top-2; the last token has one expert in layer 1."""


def test_pairs_are_counted_within_and_across_layers() -> None:
    """By hand: experts 0 and 1 share two tokens in layer 0; from expert 0 two tokens go on to expert 2."""
    found = count_coactivation(ROUTES, num_experts=4)
    assert found.tokens == 3
    assert found.within[0].tolist() == [[0, 2, 0, 1], [2, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert found.within[1].tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0]]
    assert found.across is not None
    assert found.across[0].tolist() == [[1, 1, 2, 1], [1, 0, 2, 1], [0, 0, 0, 0], [0, 1, 0, 0]]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_blocks_change_nothing(tokens: int, layers: int, top_k: int, seed: int) -> None:
    """Counting token by token or all at once gives one matrix, symmetric, with k (k - 1) pairs per token."""
    random = np.random.default_rng(seed)
    routes = np.argsort(random.random((tokens, layers, 6)), axis=2)[:, :, :top_k]
    whole = count_coactivation(routes, num_experts=6)
    block, module.BLOCK_PAIRS = module.BLOCK_PAIRS, 1
    try:
        single = count_coactivation(routes, num_experts=6)
    finally:
        module.BLOCK_PAIRS = block
    assert (whole.within == single.within).all()
    assert (whole.within == whole.within.transpose(0, 2, 1)).all()
    assert whole.within.sum(axis=(1, 2)).tolist() == [tokens * top_k * (top_k - 1)] * layers


def test_pairs_cross_nodes_as_the_placement_says() -> None:
    """Experts 0 and 1 on node 0, 2 and 3 on node 1: of six ordered pairs in layer 0 two cross."""
    found = count_coactivation(ROUTES, num_experts=4)
    apart = contiguous_placement(num_layers=2, num_experts=4, num_slots=4, num_ranks=4)
    assert cross_node_share(found, apart, num_nodes=2) == pytest.approx([2 / 6, 2 / 4])
    assert cross_node_share(found, apart, num_nodes=1).tolist() == [0.0, 0.0]
    best = top_pairs(found, apart, num_nodes=2, count=1)[0]
    assert (best.layer, best.first, best.second, best.tokens, best.cross_node) == (0, 0, 1, 2, 0.0)


def test_pairs_of_two_layers_cross_nodes_as_both_layers_are_placed() -> None:
    """Layer 1 is the other way round, and its expert 0 has a replica on each node."""
    placement = Placement(
        physical_to_logical=np.array([[0, 1, 2, 3, 3, 3], [2, 3, 0, 0, 1, 1]]), num_experts=4, num_ranks=2
    )
    (apart,) = apart_across(placement, num_nodes=2)
    assert apart[0].tolist() == [0.5, 1.0, 0.0, 0.0]
    assert apart[3].tolist() == [0.5, 0.0, 1.0, 1.0]


def test_a_replica_on_each_node_crosses_half_the_time() -> None:
    """A replica is chosen without looking at the token's other expert."""
    found = count_coactivation(np.array([[[0, 1]]]), num_experts=2)
    map_ = Placement(physical_to_logical=np.array([[0, 1, 0, -1]]), num_experts=2, num_ranks=4)
    assert cross_node_share(found, map_, num_nodes=2).tolist() == [0.5]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.zeros((2, 2), dtype=np.int64), "of shape [2, 2]: integers [tokens, layers, top_k] expected"),
        (np.zeros((1, 1, 1)), "integers [tokens, layers, top_k] expected"),
        (np.full((1, 1, 2), 4), "routes[0, 0, 0] = 4: an expert of 0 to 3 expected"),
        (np.full((1, 1, 2), -2), "routes[0, 0, 0] = -2"),
    ],
)
def test_what_is_no_route_is_named(routes: np.ndarray, message: str) -> None:
    """Place, value and what was expected."""
    with pytest.raises(UsageError) as caught:
        count_coactivation(routes, num_experts=4)
    assert message in str(caught.value)


def test_a_matrix_must_be_symmetric_counts() -> None:
    """A counted matrix is taken as it is, without its diagonal; a broken one is refused."""
    matrix = np.array([[[7, 2], [2, 9]]])
    assert coactivation_of_matrix(matrix, num_experts=2).within.tolist() == [[[0, 2], [2, 0]]]
    for broken, message in (
        (np.array([[[0, 2], [1, 0]]]), "not symmetric"),
        (np.array([[[0, -1], [-1, 0]]]), "negative"),
        (np.array([[[0, np.nan], [np.nan, 0]]]), "NaN"),
        (np.zeros((1, 3, 3)), "[layers, 2, 2] expected"),
    ):
        with pytest.raises(UsageError, match=message.replace("[", r"\[")):
            coactivation_of_matrix(broken, num_experts=2)


def test_matrices_that_do_not_fit_are_refused() -> None:
    """Memory is bounded before anything is allocated."""
    with pytest.raises(UsageError, match="give fewer layers"):
        count_coactivation(np.zeros((1, 61, 2), dtype=np.int64), num_experts=65_536)


def test_routes_are_read_from_files(tmp_path: Path) -> None:
    """NPY and NPZ with routes, NPZ with a matrix; anything else is one line."""
    np.save(tmp_path / "routes.npy", ROUTES)
    np.savez(tmp_path / "routes.npz", routes=ROUTES)
    counted = count_coactivation(ROUTES, num_experts=4)
    np.savez(tmp_path / "matrix.npz", coactivation=counted.within)
    for name in ("routes.npy", "routes.npz", "matrix.npz"):
        assert (read_coactivation(tmp_path / name, num_experts=4).within == counted.within).all()
    np.savez(tmp_path / "other.npz", x=ROUTES)
    (tmp_path / "text.npz").write_text("no archive")
    for name, message in (
        ("other.npz", "an array named routes"),
        ("text.npz", "NPZ or NPY with routes"),
        ("none.npz", "cannot read"),
    ):
        with pytest.raises(UsageError, match=message):
            read_coactivation(tmp_path / name, num_experts=4)
    with pytest.raises(UsageError, match="an expert of 0 to 1 expected"):
        read_coactivation(tmp_path / "routes.npy", num_experts=2)


def test_rows_through_a_placement_and_across_nodes() -> None:
    """Rank 0 routes 8 pairs to expert 0, which has a replica on each node: half of them leave the node."""
    map_ = Placement(physical_to_logical=np.array([[0, 0]]), num_experts=1, num_ranks=2)
    sent = communication_through(np.array([[[8.0], [0.0]]]), map_, row_bytes=10.0)
    assert sent.rows.tolist() == [[[4.0, 4.0], [0.0, 0.0]]]
    assert sent.bytes is not None
    assert sent.bytes.sum() == 80.0
    assert sent.cross_node_ratio(2).tolist() == [0.5]
    assert sent.cross_node_ratio(1).tolist() == [0.0]
    assert sent.received_ratio().tolist() == [2.0]
    nothing = Communication(rows=np.zeros((1, 2, 2)), bytes=None, measured=True)
    assert nothing.cross_node_ratio(2).tolist() == [0.0]


def test_activated_experts_are_counted_per_step() -> None:
    """Rank 0 touches both experts in one of two steps and one in the other; an empty slot never."""
    map_ = Placement(physical_to_logical=np.array([[0, 1, 2, -1]]), num_experts=3, num_ranks=2)
    steps = np.array([[[5.0, 3.0, 0.0]], [[9.0, 0.0, 1.0]]])
    assert activated_experts(steps, map_).tolist() == [[1.5, 0.5]]


def test_few_rows_activate_few_replicas() -> None:
    """One row cannot touch both replicas of its expert."""
    map_ = Placement(physical_to_logical=np.array([[0, 0]]), num_experts=1, num_ranks=2)
    assert activated_experts(np.array([[[1.0]]]), map_).tolist() == [[0.5, 0.5]]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_shapes_stand_for_the_whole_mix(steps: int, max_problems: int, seed: int) -> None:
    """Weights sum to the measured problems, the histogram holds every slot, splitting loses no row."""
    random = np.random.default_rng(seed)
    loads = random.integers(0, 50, (steps, 2, 5)).astype(np.float64)
    map_ = Placement(
        physical_to_logical=np.array([[0, 1, 2, 3, 4, 0], [4, 3, 2, 1, 0, 4]]), num_experts=5, num_ranks=3
    )
    shapes = kernel_shapes(loads, map_, max_problems=max_problems)
    assert sum(problem.weight for problem in shapes.problems) == shapes.measured_problems
    assert len(shapes.problems) <= max_problems
    assert sum(entry.count for entry in shapes.histogram) == steps * 2 * 6
    everything = kernel_shapes(loads, map_, max_problems=10_000)
    assert sum(sum(problem.rows) for problem in everything.problems) == loads.sum()


def test_rows_of_replicas_are_whole() -> None:
    """7 rows on two replicas are 4 and 3."""
    map_ = Placement(physical_to_logical=np.array([[0, 0]]), num_experts=1, num_ranks=1)
    shapes = kernel_shapes(np.array([[[7.0]]]), map_)
    assert shapes.problems[0].rows == (4, 3)
