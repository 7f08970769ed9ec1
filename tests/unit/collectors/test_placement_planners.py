"""Planners behind one interface: every plan is valid, and moetrace's own is never worse than EPLB's."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.balancedness import balancedness_sum
from moetrace_collectors.load.coactivation import CoActivation, count_coactivation
from moetrace_collectors.load.expert_map import EMPTY, Placement, contiguous_placement
from moetrace_collectors.placement.eplb import EplbPlanner
from moetrace_collectors.placement.migration import copies_needed
from moetrace_collectors.placement.move_budget import climb, fill_empty, with_room
from moetrace_collectors.placement.planners import PLANNERS
from moetrace_collectors.placement.problem import PlanProblem, never
from moetrace_collectors.placement.step_cost import Basis, GemmTime, StepCost
from moetrace_collectors.placement.step_time_planner import StepTimePlanner, predicted_us, without_noise
from moetrace_collectors.placement.topology import Topology

ESFT = np.array(
    json.loads((Path(__file__).parents[2] / "data" / "loads" / "esft_law_counts.json").read_text())["counts"],
    dtype=np.float64,
)


def problem(
    windows: np.ndarray,
    *,
    slots: int,
    ranks: int,
    nodes: int = 1,
    groups: int = 1,
    today: Placement | None = None,
    pairs: CoActivation | None = None,
    max_moves: int | None = None,
    top_k: int | None = 6,
) -> PlanProblem:
    """A problem with plain costs."""
    topology = Topology(num_ranks=ranks, num_nodes=nodes)
    gemm = GemmTime(start_us=5.0, us_per_row=0.2, basis=Basis.GIVEN)
    return PlanProblem(
        windows=windows,
        num_slots=slots,
        topology=topology,
        cost=StepCost(topology=topology, gemm=gemm, top_k=top_k),
        num_groups=groups,
        today=today,
        coactivation=pairs,
        max_moves=max_moves,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.integers(0, 2**32 - 1),
)
def test_every_plan_is_valid_and_ours_is_never_worse_than_eplb(
    layers: int, windows: int, spare: int, per_rank: int, nodes: int, seed: int
) -> None:
    """Any loads, zeros included: all planners fill all slots, and no layer's fullest rank exceeds EPLB's."""
    random = np.random.default_rng(seed)
    ranks = 2 * nodes
    experts = ranks * per_rank
    loads = np.floor(random.lognormal(3.0, 2.0, (windows, layers, experts)))
    case = problem(loads, slots=experts + spare * ranks, ranks=ranks, nodes=nodes, groups=nodes)
    plans = {planner.name: planner.plan(case) for planner in PLANNERS}
    for plan in plans.values():
        assert (plan.replica_counts.sum(axis=1) == experts + spare * ranks).all()
        assert plan.rank_loads(case.loads).sum() == pytest.approx(case.loads.sum())
    fullest = {name: plan.rank_loads(case.loads).max(axis=1) for name, plan in plans.items()}
    assert (fullest["moetrace"] <= fullest["eplb"] * (1.0 + 1e-9)).all()


@pytest.mark.parametrize(
    ("slots", "ranks", "nodes", "groups"), [(64, 8, 1, 1), (72, 8, 1, 1), (80, 16, 2, 8), (80, 16, 2, 1)]
)
def test_better_than_eplb_on_recorded_loads_in_sample_and_held_out(
    slots: int, ranks: int, nodes: int, groups: int
) -> None:
    """Real loads: better balanced in sum, step by step, and on the half that was not planned on."""
    whole = problem(ESFT, slots=slots, ranks=ranks, nodes=nodes, groups=groups)
    eplb, ours = EplbPlanner().plan(whole), StepTimePlanner().plan(whole)
    for loads in (whole.loads, ESFT):
        assert balancedness_sum(ours.rank_loads(loads)) > balancedness_sum(eplb.rank_loads(loads))
    assert predicted_us(whole, ours).sum() < predicted_us(whole, eplb).sum()
    past = problem(ESFT[:16], slots=slots, ranks=ranks, nodes=nodes, groups=groups)
    eplb, ours = EplbPlanner().plan(past), StepTimePlanner().plan(past)
    for future in (ESFT[16:].sum(axis=0), ESFT[16:]):
        assert balancedness_sum(ours.rank_loads(future)) > balancedness_sum(eplb.rank_loads(future))


def test_plans_are_the_same_every_time() -> None:
    """No clock and no chance in a plan."""
    case = problem(ESFT, slots=72, ranks=8)
    first, second = (StepTimePlanner().plan(case).physical_to_logical for _ in range(2))
    assert (first == second).all()


def test_experts_that_are_hot_together_come_apart() -> None:
    """Experts 0 and 1 are hot in one window, 2 and 3 in the other: sums are equal, so only windows tell."""
    windows = np.array([[[9.0, 9.0, 1.0, 1.0]], [[1.0, 1.0, 9.0, 9.0]]])
    ours = StepTimePlanner().plan(problem(windows, slots=4, ranks=2))
    assert ours.rank_loads(windows).max() == 10.0
    apart = {tuple(sorted(row)) for row in ours.physical_to_logical.reshape(2, 2).tolist()}
    assert apart <= {(0, 2), (0, 3), (1, 2), (1, 3)}


def test_steady_loads_are_not_fitted_to_their_noise() -> None:
    """Windows that differ by chance alone become equal; a burst stays."""
    random = np.random.default_rng(0)
    steady = random.poisson(500.0, (16, 1, 32)).astype(np.float64)
    assert without_noise(steady).std(axis=0).mean() < 0.35 * steady.std(axis=0).mean()
    assert without_noise(steady).sum(axis=0) == pytest.approx(steady.sum(axis=0))
    burst = steady.copy()
    burst[3, 0, 5] *= 10.0
    assert without_noise(burst)[3, 0, 5] > 0.8 * burst[3, 0, 5]


def topical_routes(*, tokens: int, layers: int, experts: int, top_k: int, topics: int) -> np.ndarray:
    """Tokens have a topic, topics have experts (scattered over ids) that serve most of their tokens."""
    random = np.random.default_rng(3)
    routes = np.empty((tokens, layers, top_k), dtype=np.int64)
    for layer in range(layers):
        topic_of = random.permutation(experts) % topics
        topic = random.integers(0, topics, tokens)
        score = random.gumbel(size=(tokens, experts)) + 4.0 * (topic_of == topic[:, None])
        routes[:, layer] = np.argsort(-score, axis=1)[:, :top_k]
    return routes


def test_experts_that_share_tokens_share_a_node() -> None:
    """Where topics decide, network copies fall by a quarter or more, and ranks get 2 % fuller at most."""
    routes = topical_routes(tokens=8192, layers=4, experts=32, top_k=4, topics=8)
    counts = np.stack(
        [
            np.stack([np.bincount(part[:, layer].ravel(), minlength=32) for layer in range(4)])
            for part in np.array_split(routes, 8)
        ]
    ).astype(np.float64)
    pairs = count_coactivation(routes, num_experts=32)
    case = problem(counts, slots=40, ranks=8, nodes=4, pairs=pairs, top_k=4)
    eplb, ours = EplbPlanner().plan(case), StepTimePlanner().plan(case)
    assert node_copies(routes, ours) < 0.75 * node_copies(routes, eplb)
    assert predicted_us(case, ours).sum() < 0.95 * predicted_us(case, eplb).sum()
    caps = eplb.rank_loads(case.loads).max(axis=1)
    assert (ours.rank_loads(case.loads).max(axis=1) <= caps * (1.02 + 1e-9)).all()
    # Where nodes do not matter, neither do topics: the caps hold as they are.
    flat = problem(counts, slots=40, ranks=8, nodes=1, pairs=pairs, top_k=4)
    assert (StepTimePlanner().plan(flat).rank_loads(case.loads).max(axis=1) <= caps * (1.0 + 1e-9)).all()


def node_copies(routes: np.ndarray, plan: Placement, *, nodes: int = 4) -> float:
    """Nodes that each token reaches, summed over tokens and layers, replicas chosen at random."""
    share = plan.share.reshape(*plan.share.shape[:2], nodes, -1).sum(axis=3)
    copies = 0.0
    for layer in range(routes.shape[1]):
        copies += (1.0 - np.prod(1.0 - share[layer][routes[:, layer]], axis=1)).sum()
    return copies


@pytest.mark.parametrize(
    ("slots", "max_moves"), [(64, 0), (64, 2), (64, 10), (64, 100), (72, 0), (72, 1), (72, 10), (72, 100)]
)
def test_the_migration_budget_is_kept_and_used(slots: int, max_moves: int) -> None:
    """Never more copies than allowed; enough for one swap or one replica, it is better than staying."""
    today = contiguous_placement(num_layers=26, num_experts=64, num_slots=64, num_ranks=8)
    case = problem(ESFT, slots=slots, ranks=8, today=today, max_moves=max_moves)
    plan = StepTimePlanner().plan(case)
    room = with_room(today, slots)
    moved = int(copies_needed(room, plan).sum())
    assert moved <= max_moves
    better = predicted_us(case, plan).sum() < predicted_us(case, room).sum()
    assert better == (max_moves > 0)
    if max_moves == 0:
        assert plan.physical_to_logical.tolist() == room.physical_to_logical.tolist()


def test_more_moves_buy_more() -> None:
    """The predicted time falls with the budget, down to the unlimited plan."""
    today = contiguous_placement(num_layers=26, num_experts=64, num_slots=64, num_ranks=8)
    times = []
    for moves in (5, 50, 500, None):
        case = problem(ESFT, slots=64, ranks=8, today=today, max_moves=moves)
        times.append(predicted_us(case, StepTimePlanner().plan(case)).sum())
    assert times == sorted(times, reverse=True)


def test_the_budget_goes_where_it_is_worth_most() -> None:
    """Of two layers the one with more gain per move; a rung that costs nothing is always taken."""
    values = np.array([[10.0, 10.0], [9.0, 4.0], [1.0, 3.5]])
    moves = np.array([[0, 0], [0, 2], [4, 3]])
    assert climb(values, moves, 0).tolist() == [1, 0]
    assert climb(values, moves, 2).tolist() == [1, 1]
    assert climb(values, moves, 6).tolist() == [2, 1]
    assert climb(values, moves, 7).tolist() == [2, 2]


def test_empty_slots_are_filled_with_the_heaviest() -> None:
    """The hot expert's replica goes to the lightest rank with room."""
    slots = np.array([[0, EMPTY, 1, EMPTY]])
    assert fill_empty(slots, np.array([[90.0, 10.0]]), 2).tolist() == [[0, 0, 1, 0]]


def test_ranks_are_renamed_so_that_experts_stay() -> None:
    """The plan that is in use already needs no move, and the full plan needs fewer than EPLB's."""
    first = StepTimePlanner().plan(problem(ESFT, slots=72, ranks=8))
    again = problem(ESFT, slots=72, ranks=8, today=first)
    assert int(copies_needed(first, StepTimePlanner().plan(again)).sum()) == 0
    today = contiguous_placement(num_layers=26, num_experts=64, num_slots=72, num_ranks=8)
    case = problem(ESFT, slots=72, ranks=8, today=today)
    ours, eplb = (planner.plan(case) for planner in (StepTimePlanner(), EplbPlanner()))
    assert copies_needed(today, ours).sum() < copies_needed(today, eplb).sum()


def test_time_is_bounded() -> None:
    """Out of time from the start, a plan is still valid and not worse than EPLB's."""
    case = problem(ESFT, slots=72, ranks=8)
    assert not never()
    asked = PlanProblem(
        windows=case.windows,
        num_slots=72,
        topology=case.topology,
        cost=case.cost,
        out_of_time=lambda: True,
    )
    plan, eplb = StepTimePlanner().plan(asked), EplbPlanner().plan(case)
    assert (plan.rank_loads(case.loads).max(axis=1) <= eplb.rank_loads(case.loads).max(axis=1) + 1e-9).all()


def test_a_large_model_is_planned_within_a_second() -> None:
    """61 layers x 256 experts -> 288 slots on 32 ranks, in CPU time of one core."""
    loads = np.random.default_rng(0).poisson(
        np.random.default_rng(1).lognormal(5.0, 1.0, (61, 256)), (16, 61, 256)
    )
    case = problem(loads.astype(np.float64), slots=288, ranks=32, nodes=4, groups=8)
    used = []
    for _ in range(3):
        began = time.process_time()
        StepTimePlanner().plan(case)
        used.append(time.process_time() - began)
    assert min(used) < 1.0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"slots": 70, "ranks": 8}, "slots = 70 do not divide by ranks = 8"),
        ({"slots": 56, "ranks": 8}, "slots = 56 are fewer than 64 experts"),
        ({"slots": 64, "ranks": 8, "nodes": 3}, "nodes = 3 do not divide ranks = 8"),
        ({"slots": 64, "ranks": 8, "groups": 7}, "groups = 7 do not divide 64 experts"),
        ({"slots": 64, "ranks": 0}, "ranks = 0: 1 or more expected"),
    ],
)
def test_what_cannot_be_planned_is_named(sizes: dict[str, int], message: str) -> None:
    """One line with the field, its value and the fix."""
    with pytest.raises(UsageError) as caught:
        problem(ESFT, **sizes)  # type: ignore[arg-type]
    assert message in str(caught.value)
