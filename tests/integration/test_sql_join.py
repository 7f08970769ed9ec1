"""The join in SQL says what the collector said online, or leaves it out; never something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration.collector_process import rows
from integration.joined_process import filled_store
from joined_store import LOST_EXCHANGE, NUM_STEPS, Told, read_truth
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse_rows import verdict_rows
from moetrace_collectors.sinks.exchange_scope import rows_by_scope
from moetrace_collectors.verdict.attribution import blame
from moetrace_collectors.verdict.frontier import group_frontier
from moetrace_collectors.verdict.matching import group_sequences

Key = tuple[str, int]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory whose store was filled by the online path, with the truth beside it."""
    return filled_store(tmp_path_factory.mktemp("joined"))


@pytest.fixture(scope="module")
def truth(store: Path) -> dict[Key, Told]:
    """What was found out online."""
    return read_truth(store / "truth")


@pytest.fixture(scope="module")
def barriers(store: Path) -> dict[Key, list[dict[str, Any]]]:
    """v_step_barriers by step."""
    return by_step(rows(store, "SELECT * FROM v_step_barriers ORDER BY run_id, step, ep_group, barrier"))


@pytest.fixture(scope="module")
def verdicts(store: Path) -> dict[Key, dict[str, Any]]:
    """v_step_verdicts by step."""
    found = by_step(rows(store, "SELECT * FROM v_step_verdicts"))
    assert {len(of_step) for of_step in found.values()} == {1}
    return {key: of_step[0] for key, of_step in found.items()}


def by_step(found: list[dict[str, object]]) -> dict[Key, list[dict[str, Any]]]:
    """Rows by (run, step); 64-bit numbers come as text."""
    grouped: dict[Key, list[dict[str, Any]]] = {}
    for row in found:
        grouped.setdefault((str(row["run_id"]), int(str(row["step"]))), []).append(row)
    return grouped


def same_exchanges(told: Told, group: int) -> bool:
    """Whether the ranks of a group have recorded one sequence of exchanges."""
    sequence = next(s for s in group_sequences(told.joined) if s.ep_group == group)
    return not sequence.unmatched.any() and not sequence.left_out_ranks


def undecided(told: Told) -> set[int]:
    """Groups with two ranks or more of which one is missing: the history of transfers decides there."""
    return {
        s.ep_group for s in group_sequences(told.joined) if s.num_exchanges and 2 <= len(s.ranks) < s.ep_size
    }


def test_the_runs_have_what_this_is_about(truth: dict[Key, Told], store: Path) -> None:
    """200 steps with missing and late ranks and repeats, ties, microbatches, streams and a lost exchange."""
    missing = [told for (run, _), told in truth.items() if run == "missing"]
    assert len(missing) == NUM_STEPS
    assert 5 < sum(bool(told.joined.missing_ranks) for told in missing) < 60
    assert sum(bool(undecided(told)) for told in missing) > 5
    late = rows(store, "SELECT count() AS n FROM rank_steps FINAL WHERE late = 1")
    assert int(str(late[0]["n"])) > 5
    twice = rows(
        store, "SELECT (SELECT count() FROM rank_steps) - (SELECT count() FROM rank_steps FINAL) AS n"
    )
    assert int(str(twice[0]["n"])) > 100
    assert not same_exchanges(truth["odd", LOST_EXCHANGE], 1)


def test_barriers_are_the_same_to_the_nanosecond(
    truth: dict[Key, Told], barriers: dict[Key, list[dict[str, Any]]]
) -> None:
    """Every exchange of every group; NULL exactly where ranks are missing and history would decide."""
    compared = left_out = 0
    for key, told in truth.items():
        result = StepResult(joined=told.joined, verdict=told.verdict, loads=())
        table = verdict_rows([result])[1]
        expected = [dict(zip(table.names, row, strict=True)) for row in zip(*table.columns, strict=True)]
        open_groups = undecided(told)
        matched = [row for row in expected if same_exchanges(told, row["ep_group"])]
        found = barriers.get(key, [])
        assert len(found) == len(matched), key
        for want, have in zip(matched, found, strict=True):
            for name in want.keys() - {"step_time", "releaser_rank", "ambiguous"}:
                assert str(have[name]) == str(want[name]), (key, want["barrier"], name)
            if want["ep_group"] in open_groups:
                left_out += 1
                assert have["releaser_rank"] is None
                assert have["ambiguous"] in (None, 1)
                assert have["ambiguous"] is None or want["ambiguous"] == 1
            else:
                compared += 1
                assert (have["releaser_rank"], have["ambiguous"]) == (
                    want["releaser_rank"],
                    want["ambiguous"],
                )
    assert compared > 3_000
    assert left_out > 30


def test_frontiers_and_phases_are_the_same(
    truth: dict[Key, Told], verdicts: dict[Key, dict[str, Any]]
) -> None:
    """Length, extension and phases of every step, who is missing, mode and warm-up."""
    assert verdicts.keys() == truth.keys()
    for key, told in truth.items():
        have, verdict = verdicts[key], told.verdict
        assert have["missing_ranks"] == list(told.joined.missing_ranks), key
        assert (have["world_size"], have["forward_mode"], have["warmup"]) == (
            told.joined.world_size,
            verdict.forward_mode.value,
            int(verdict.warmup),
        )
        if key == ("odd", LOST_EXCHANGE):
            assert (have["step_ns"], have["extension_ns"], have["phase_ns"]) == (None, None, {})
            continue
        assert (int(have["step_ns"]), int(have["extension_ns"])) == (verdict.step_ns, verdict.extension_ns), (
            key
        )
        assert {name: int(ns) for name, ns in have["phase_ns"].items()} == {
            phase.value: ns for phase, ns in verdict.phase_ns.items()
        }, key


def test_the_largest_extension_is_the_same(
    truth: dict[Key, Told], verdicts: dict[Key, dict[str, Any]]
) -> None:
    """Rank, phase, layer, worth and share of the largest cell; left out where ranks are missing."""
    known = 0
    for key, told in truth.items():
        have = verdicts[key]
        if key == ("odd", LOST_EXCHANGE):
            continue
        frontiers = [group_frontier(sequence) for sequence in group_sequences(told.joined)]
        judged = [f for f in frontiers if f.sequence.num_exchanges and len(f.sequence.ranks) > 1]
        if undecided(told) or not judged:
            assert not have["is_known"], key
            assert have["largest_rank"] is None
            continue
        blamed = blame(judged)
        index, phase = np.unravel_index(int(blamed.worth_ns.argmax()), blamed.worth_ns.shape)
        want = blamed.suspect(int(index), int(phase))
        known += 1
        assert (
            have["largest_rank"],
            have["largest_phase"],
            have["largest_layer"],
            int(have["largest_worth_ns"]),
            have["largest_share"],
        ) == (want.rank, want.phase.value, want.layer, want.worth_ns, want.share), key
    assert known > NUM_STEPS / 2


def test_a_view_says_by_name_what_it_leaves_out(verdicts: dict[Key, dict[str, Any]]) -> None:
    """No column of the view is called like one that only the engine's history can fill."""
    columns = set(next(iter(verdicts.values())))
    assert not columns & {
        "evidence",
        "reason",
        "rank",
        "layer",
        "phase",
        "cause",
        "runner_up_rank",
        "closed_by",
    }


def test_layer_loads_are_the_same(truth: dict[Key, Told], store: Path) -> None:
    """Tokens, max over mean, spread, hot and dead experts, and the balance over ranks."""
    found = by_step(rows(store, "SELECT * FROM v_layer_loads ORDER BY run_id, step, layer, forward_mode"))
    for key, told in truth.items():
        have = found.get(key, [])
        assert len(have) == len(told.loads), key
        for row, load in zip(have, told.loads, strict=True):
            assert (row["layer"], row["forward_mode"], int(row["tokens"])) == (
                load.layer,
                load.forward_mode.value,
                load.tokens,
            )
            assert (int(row["hot_expert"]), int(row["dead_experts"])) == (load.hot_expert, load.dead_experts)
            assert (row["max_mean_ratio"], row["rank_max_mean_ratio"]) == (
                load.max_mean_ratio,
                load.rank_max_mean_ratio,
            )
            # Sums of squares in another order: the last bits of a double may differ.
            assert row["cv"] == pytest.approx(load.cv, rel=1e-12)


def test_the_heat_map_adds_up(truth: dict[Key, Told], store: Path) -> None:
    """Routed pairs of all experts are the layer's tokens, and the hottest is max over mean."""
    found = rows(
        store,
        "SELECT run_id, step, layer, forward_mode, sum(routed) AS tokens, max(load_over_mean) AS hottest "
        "FROM v_expert_heatmap GROUP BY run_id, step, layer, forward_mode",
    )
    have = {(row["run_id"], int(str(row["step"])), row["layer"], row["forward_mode"]): row for row in found}
    wanted = {
        (run, step, load.layer, load.forward_mode.value): load
        for (run, step), told in truth.items()
        for load in told.loads
    }
    assert have.keys() == wanted.keys()
    for key, load in wanted.items():
        assert int(str(have[key]["tokens"])) == load.tokens
        assert have[key]["hottest"] == load.max_mean_ratio


def test_traffic_by_scope_is_the_same(truth: dict[Key, Told], store: Path) -> None:
    """Rows to the rank itself, inside its host, across hosts, and to ranks that did not arrive."""
    found = rows(
        store,
        "SELECT run_id, step, phase, scope, sum(rows) AS sent FROM v_traffic "
        "GROUP BY run_id, step, phase, scope HAVING sent > 0",
    )
    have: dict[Key, dict[tuple[str, str], int]] = {key: {} for key in truth}
    for row in found:
        scopes = have[str(row["run_id"]), int(str(row["step"]))]
        scopes[str(row["phase"]), str(row["scope"])] = int(str(row["sent"]))
    scopes_seen = set()
    for key, told in truth.items():
        want = rows_by_scope(told.joined.rank_steps)
        scopes_seen |= {scope for _, scope in want}
        assert have[key] == want, key
    assert scopes_seen == {"same_rank", "same_node", "cross_node", "unknown"}


def test_a_step_is_read_by_its_primary_key(store: Path) -> None:
    """A filter on run and step reaches the tables below a view, so that one step costs one step."""
    for view in ("v_step_barriers", "v_step_verdicts", "v_layer_loads", "v_expert_heatmap", "v_traffic"):
        plan = rows(
            store,
            f"EXPLAIN indexes = 1, pretty = 0 SELECT * FROM {view} WHERE run_id = 'missing' AND step = 7",
        )
        text = "\n".join(str(row["explain"]) for row in plan)
        reads = text.count("ReadFromMergeTree")
        assert reads >= 2
        assert text.count("step in [7, 7]") == reads, (view, text)


def test_roll_ups_add_up_to_their_tables(store: Path) -> None:
    """Where nothing was written twice, minutes hold what their tables hold, durations by bucket included."""
    [sums] = rows(
        store,
        "SELECT (SELECT sum(count) FROM expert_load_minutes WHERE run_id = 'ties') AS pairs, "
        "(SELECT sum(count) FROM expert_loads FINAL WHERE run_id = 'ties') AS pairs_of_rows, "
        "(SELECT (sum(intervals), sum(duration_ns), max(longest_ns)) "
        "FROM phase_minutes WHERE run_id = 'ties') AS spans, "
        "(SELECT (count(), sum(duration_ns), max(duration_ns)) "
        "FROM phase_spans FINAL WHERE run_id = 'ties') AS spans_of_rows, "
        "(SELECT (sum(exchanges), sum(wait_ns)) FROM exchange_minutes WHERE run_id = 'ties') AS waits, "
        "(SELECT (count(), sum(wait_sum_ns)) FROM step_barriers FINAL "
        "WHERE run_id = 'ties' AND phase != 'outside') AS waits_of_rows",
    )
    assert sums["pairs"] == sums["pairs_of_rows"] != "0"
    assert sums["spans"] == sums["spans_of_rows"]
    assert sums["waits"] == sums["waits_of_rows"]
    [bucket] = rows(
        store,
        "SELECT mapKeys(sumMap(by_duration)) AS buckets, mapValues(sumMap(by_duration)) AS counts "
        "FROM phase_minutes WHERE run_id = 'ties' AND phase = 'router'",
    )
    # 50 us of every router: floor(8 log2(50,000)) = 124, the middle of that bucket is 48.9 us.
    assert (bucket["buckets"], bucket["counts"]) == ([124], [4 * 2 * 20])
    assert pytest.approx(50_000, rel=0.045) == 2 ** (124.5 / 8)


def test_a_run_is_one_row(store: Path) -> None:
    """Repeats and late ranks change nothing: sets, minima and maxima."""
    found = rows(
        store,
        "SELECT run_id, world_size, length(ranks) AS num_ranks, last_step, model_names, hosts, ep_size "
        "FROM v_runs ORDER BY run_id",
    )
    assert [
        (
            row["run_id"],
            row["world_size"],
            int(str(row["num_ranks"])),
            int(str(row["last_step"])),
            row["ep_size"],
        )
        for row in found
    ] == [("missing", 8, 8, 199, 4), ("odd", 8, 8, 59, 4), ("ties", 4, 4, 19, 4)]
    assert found[2]["model_names"] == ["synthetic-moe"]
    assert found[0]["hosts"] == ["node0", "node1", "node2", "node3"]
