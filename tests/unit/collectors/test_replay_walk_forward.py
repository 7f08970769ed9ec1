"""Honest replay: planned on the past, scored on the future, and what is recommended for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrace_collectors.load.expert_map import Placement
from moetrace_collectors.load.series import GemmSamples, LoadSeries
from moetrace_collectors.placement.alternatives import Alternative, Option, alternatives
from moetrace_collectors.placement.case import ReplayRequest, make_case
from moetrace_collectors.placement.planners import PLANNERS
from moetrace_collectors.placement.problem import PlanProblem
from moetrace_collectors.placement.recommendation import Action, Recommendation, recommend
from moetrace_collectors.placement.replay import ReplayCase, folds, replay_planner
from moetrace_collectors.placement.step_cost import Basis
from moetrace_schemas.enums import ForwardMode

DATA = Path(__file__).parents[2] / "data" / "loads"
ESFT = np.array(json.loads((DATA / "esft_law_counts.json").read_text())["counts"], dtype=np.float64)
KNOWN = json.loads((DATA / "esft_law_expected.json").read_text())


def series(loads: np.ndarray, *, forward_mode: ForwardMode | None = None) -> LoadSeries:
    """Loads [S, L, E] as a recording of single steps."""
    steps, layers, _ = loads.shape
    return LoadSeries(
        source="made by hand",
        forward_mode=forward_mode,
        cohort=None,
        steps=np.arange(steps),
        steps_in_entry=np.ones(steps, dtype=np.int64),
        layers=np.arange(layers),
        layer_names=tuple(str(layer) for layer in range(layers)),
        loads=loads,
        top_k=2,
    )


def case(recorded: LoadSeries, *, today: Placement | None = None, **asked: object) -> ReplayCase:
    """A case without a clock."""
    made, _, _ = make_case(recorded, ReplayRequest(**asked), today=today)  # type: ignore[arg-type]
    return made


def answer(made: ReplayCase) -> tuple[Recommendation, dict[Option, Alternative]]:
    """Replay everything and recommend."""
    options = alternatives(made, [replay_planner(made, planner) for planner in PLANNERS])
    return recommend(made, options), {option.option: option for option in options}


def steady(steps: int = 12) -> np.ndarray:
    """Experts 0 and 1, both on rank 0, are always hot."""
    random = np.random.default_rng(0)
    return random.poisson(np.array([400.0, 400.0] + [100.0] * 6), (steps, 3, 8)).astype(np.float64)


def test_known_values_of_a_recorded_run() -> None:
    """EPLB on real loads: in sample as published to 1e-9, held out near the known half-to-half value."""
    for slots, groups, nodes, ranks in ((64, 1, 1, 8), (72, 1, 1, 8), (80, 8, 2, 16)):
        made = case(series(ESFT), num_ranks=ranks, num_nodes=nodes, num_slots=slots, num_groups=groups)
        result = replay_planner(made, next(planner for planner in PLANNERS if planner.name == "eplb"))
        sizes = f"rep{slots}_grp{groups}_node{nodes}_gpu{ranks}"
        known = KNOWN[f"eplb_{sizes}"]["rank_loads"]
        assert np.sort(result.rank_loads, axis=1) == pytest.approx(np.sort(np.array(known), axis=1), abs=1e-9)
        held_out, in_sample = result.held_out, result.in_sample
        assert held_out is not None
        assert in_sample is not None
        assert held_out.balancedness < in_sample.balancedness
        # The known value splits tokens in halves, ours splits steps: 16 and 17 of them.
        half = KNOWN[f"replay_first_half_to_second_half_{sizes}"]["vllm_style"]
        assert held_out.balancedness == pytest.approx(half, abs=5e-3)


def test_ours_holds_out_better_than_every_other_planner() -> None:
    """Real loads, two and four windows: the shortest predicted step on what was not planned on."""
    for windows in (2, 4):
        made = case(series(ESFT), num_ranks=16, num_nodes=2, num_slots=80, num_groups=8, windows=windows)
        results = {planner.name: replay_planner(made, planner) for planner in PLANNERS}
        times = {name: result.held_out.step_ms for name, result in results.items() if result.held_out}
        assert min(times, key=times.__getitem__) == "moetrace"


@given(st.integers(1, 50), st.integers(2, 9))
def test_folds_never_look_ahead(entries: int, windows: int) -> None:
    """Everything planned on lies before everything scored, every later entry is scored once."""
    parts = folds(entries, windows)
    scored: list[int] = []
    for fold in parts:
        assert fold.plan.start == 0
        assert 0 < fold.plan.stop == fold.score.start < fold.score.stop
        scored += range(fold.score.start, fold.score.stop)
    first = parts[0].score.start if parts else entries
    assert scored == list(range(first, entries))
    assert bool(parts) == (entries > 1)


class Memorising:
    """Writes down what it was given, and plans in order."""

    name = "eplb"

    def __init__(self) -> None:
        self.given: list[np.ndarray] = []

    def plan(self, problem: PlanProblem) -> Placement:
        """See Planner."""
        self.given.append(problem.windows)
        return PLANNERS[0].plan(problem)


def test_a_planner_sees_only_the_past() -> None:
    """On everything once, then per fold on the past, and for hindsight on the scored window."""
    loads = np.arange(1.0, 7.0)[:, None, None] * np.ones((6, 1, 4))
    planner = Memorising()
    replay_planner(case(series(loads), num_ranks=2, windows=3), planner)
    seen = [given[:, 0, 0].tolist() for given in planner.given]
    assert seen == [[1, 2, 3, 4, 5, 6], [1, 2], [1, 2, 3, 4], [3, 4], [5, 6]]


def test_a_stable_hot_rank_is_worth_a_move() -> None:
    """Hot experts that sit together and stay hot: move, with bytes, seconds and a break-even time."""
    found, options = answer(case(series(steady()), num_ranks=4, expert_mb=10.0))
    assert found.action in (Action.MOVE, Action.REPLICATE)
    move = options[Option.MOVE]
    assert move.saved is not None
    assert move.saved > 0.2
    assert move.migration is not None
    assert move.migration.bytes > 0
    assert move.break_even_s is not None
    assert move.break_even_s == pytest.approx(move.migration.seconds / move.saved)


def test_bursts_look_good_in_sample_only() -> None:
    """Other experts are hot in every window: hindsight is even, plans on the past are not, so do not move."""
    loads = np.full((16, 2, 16), 100.0)
    for window in range(4):
        # One hot expert per rank of the placement in use, which is even all the time.
        loads[4 * window : 4 * window + 4, :, window::4] *= 6.0
    made = case(series(loads), num_ranks=4, windows=4)
    for planner in PLANNERS[2:]:
        result = replay_planner(made, planner)
        assert result.in_sample is not None
        assert result.held_out is not None
        assert result.in_sample.balancedness == pytest.approx(1.0)
        assert result.held_out.balancedness < 0.9
        assert result.saved < 0.0
        assert result.break_even_s is None
    found, _ = answer(made)
    assert found.action is Action.DO_NOT_MOVE
    assert found.planner is None
    assert found.sentence.startswith("do not move: ")


def test_an_even_placement_is_left_alone() -> None:
    """What is in use is as good as anything: nothing would be won."""
    loads = np.full((6, 2, 8), 100.0)
    found, _ = answer(case(series(loads), num_ranks=4))
    assert found.action is Action.DO_NOT_MOVE
    assert found.saved <= 0.01


def test_a_migration_that_takes_too_long_does_not_pay() -> None:
    """The same gain, but experts of 400 GB over a slow network, and a placement that stays a minute."""
    made = case(series(steady()), num_ranks=4, num_nodes=4, expert_mb=4e5, link_gb_per_s=10.0, horizon_s=60.0)
    found, options = answer(made)
    assert options[Option.MOVE].saved is not None
    assert options[Option.MOVE].saved > 0.1
    assert found.action is Action.DO_NOT_MOVE
    assert "does not pay" in found.sentence
    patient, _ = answer(replace(made, horizon_s=1e6))
    assert patient.action in (Action.MOVE, Action.REPLICATE)


def test_one_entry_is_not_enough_evidence() -> None:
    """No future to score on: in-sample figures, and an answer that says so."""
    made = case(series(steady(1)), num_ranks=4)
    result = replay_planner(made, PLANNERS[-1])
    assert (result.held_out, result.in_sample) == (None, None)
    found, _ = answer(made)
    assert found.action is Action.NOT_ENOUGH_EVIDENCE
    assert "record more steps" in found.sentence


def test_memory_decides_what_is_possible() -> None:
    """Replicas that do not fit are shown as such and not recommended."""
    # 2 experts per rank and 3 layers of 10 MB: 60 MB; a third slot would need 90.
    made = case(series(steady()), num_ranks=4, expert_mb=10.0, memory_gb=0.08)
    found, options = answer(made)
    assert not options[Option.REPLICATE].possible
    assert options[Option.REPLICATE].memory_gb == pytest.approx(0.03)
    assert found.action is Action.MOVE


def test_a_limit_on_moves_limits_what_is_recommended() -> None:
    """Planners that know no limit are not recommended beyond it."""
    made = case(series(steady()), num_ranks=4, max_moves=6)
    found, options = answer(made)
    assert found.action in (Action.MOVE, Action.REPLICATE, Action.DO_NOT_MOVE)
    best = options[Option.MOVE]
    assert best.migration is not None
    assert best.migration.copies <= 6


def test_sharding_the_hottest_expert_is_scored() -> None:
    """Half of the hot expert's work goes to the lightest rank of the node, all of its rows to both."""
    _, options = answer(case(series(steady()), num_ranks=4))
    shard, stay = options[Option.SHARD], options[Option.STAY]
    assert shard.step_ms is not None
    assert stay.step_ms is not None
    assert shard.step_ms < stay.step_ms
    assert "at best" in shard.note
    alone, options = answer(case(series(steady()), num_ranks=4, num_nodes=4))
    assert not options[Option.SHARD].possible
    assert alone.action is not None


def test_cohorts_tell_whom_to_limit() -> None:
    """Without the cohort that makes the hot experts hot, ranks would be even."""
    hot = np.zeros((4, 1, 4))
    hot[:, :, :2] = 300.0
    even = np.full((4, 1, 4), 100.0)
    made = case(series(hot + even), num_ranks=2)
    cohorts = [replace(series(hot), cohort="batch"), replace(series(even), cohort="chat")]
    results = [replay_planner(made, planner) for planner in PLANNERS]
    limit = next(o for o in alternatives(made, results, cohorts) if o.option is Option.LIMIT_RATES)
    assert limit.possible
    assert "without cohort batch (60 % of the pairs)" in limit.note
    assert "would be 1.00 instead of 1.60" in limit.note
    nobody = next(o for o in alternatives(made, results) if o.option is Option.LIMIT_RATES)
    assert not nobody.possible


def test_replicas_are_synchronised_in_training_only() -> None:
    """In training every further replica exchanges gradients, which costs time; in serving nothing."""
    training = case(series(steady(), forward_mode=ForwardMode.TRAIN), num_ranks=4, num_slots=12)
    serving = case(series(steady(), forward_mode=ForwardMode.DECODE), num_ranks=4, num_slots=12)
    _, trained = answer(training)
    _, served = answer(serving)
    # 4 further replicas in each of 3 layers.
    assert trained[Option.REPLICATE].sync_bytes == 2 * 12 * training.memory.expert_bytes
    assert served[Option.REPLICATE].sync_bytes == 0.0
    assert training.cost.passes == 3.0
    assert serving.cost.exchanges == 2.0


def test_recorded_times_are_used() -> None:
    """A fitted line and a recorded step: savings are parts of the whole step, and none of it is assumed."""
    rows = np.linspace(50.0, 1000.0, 200)
    recorded = replace(
        series(steady()), gemm=GemmSamples(rows=rows, microseconds=20.0 + 2.0 * rows), step_ms=1000.0
    )
    made, assumptions, _ = make_case(recorded, ReplayRequest(num_ranks=4))
    assert made.cost.gemm.basis is Basis.FITTED
    assert made.cost.gemm.us_per_row == pytest.approx(2.0)
    assert not any("per row" in assumption for assumption in assumptions)
    small, _ = answer(made)
    whole, _ = answer(replace(made, series=replace(recorded, step_ms=None)))
    assert small.saved < 0.01 < whole.saved
    assert small.action is Action.DO_NOT_MOVE


def test_router_changes_are_listed_with_what_they_need() -> None:
    """Never scored: it changes what the model computes."""
    _, options = answer(case(series(steady()), num_ranks=4))
    router = options[Option.CHANGE_ROUTER]
    assert (router.step_ms, router.saved, router.possible) == (None, None, False)
    assert "quality" in router.note
