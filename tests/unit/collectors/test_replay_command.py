"""`moetrace replay`: promised fields against the published schema; bad input in one line."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from moetrace_collectors.cli import main

DATA = Path(__file__).parents[2] / "data" / "loads"
ESFT = str(DATA / "esft_law_counts.json")
KNOWN = json.loads((DATA / "esft_law_expected.json").read_text())
SCHEMA = json.loads(
    resources.files("moetrace_schemas.json").joinpath("replay_result.schema.json").read_text(encoding="utf-8")
)


def replay(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The document of one call, valid against its schema."""
    assert main(["replay", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    return document


def test_the_schema_is_one() -> None:
    """The published schema is valid itself."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_planners_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """Five planners with every promised field; EPLB's as published, ours better in and out of sample."""
    document = replay(capsys, ESFT, "--slots", "72", "--ranks", "8")
    planners = {planner["planner"]: planner for planner in document["planners"]}
    assert list(planners) == ["contiguous", "round_robin", "greedy", "eplb", "moetrace"]
    known = KNOWN["eplb_rep72_grp1_node1_gpu8"]
    eplb, ours = planners["eplb"], planners["moetrace"]
    assert eplb["replica_counts"] == known["logcnt"]
    assert eplb["balancedness_sum"] == pytest.approx(known["vllm_style"], abs=1e-9)
    assert eplb["max_rank_load"] == max(map(max, known["rank_loads"]))
    assert ours["balancedness_sum"] >= eplb["balancedness_sum"]
    assert all(a <= b + 1e-9 for a, b in zip(ours["max_rank_loads"], eplb["max_rank_loads"], strict=True))
    assert ours["held_out"] > eplb["held_out"]
    assert ours["held_out_step_ms"] < eplb["held_out_step_ms"]
    for planner in planners.values():
        assert planner["held_out"] <= planner["in_sample"]
        assert planner["held_out_loss"] == pytest.approx(planner["in_sample"] - planner["held_out"])
        assert sum(map(sum, planner["rank_loads"])) == pytest.approx(26 * 49962)
    assert document["recommendation"]["action"] in ("move", "replicate")
    assert [option["option"] for option in document["alternatives"]] == [
        "stay",
        "move",
        "replicate",
        "shard",
        "limit_rates",
        "smaller_batches",
        "change_router",
    ]


def test_the_published_example_of_eplb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """12 experts in 4 groups on 16 slots, 8 ranks, 2 nodes: its replicas, and the loads of its own map."""
    case = json.loads((DATA.parent / "placement" / "eplb_cases.json").read_text())["readme_example"]
    path = tmp_path / "loads.json"
    path.write_text(json.dumps(case["weight"]))
    document = replay(
        capsys, str(path), "--slots", str(case["num_replicas"]), "--ranks", str(case["num_gpus"]),
        "--nodes", str(case["num_nodes"]), "--groups", str(case["num_groups"]), "--top-k", "2",
    )  # fmt: skip
    eplb = next(planner for planner in document["planners"] if planner["planner"] == "eplb")
    assert eplb["replica_counts"] == case["logcnt"]
    per_replica = np.array(case["weight"]) / np.array(case["logcnt"])
    per_slot = np.take_along_axis(per_replica, np.array(case["phy2log"]), axis=1)
    assert eplb["rank_loads"] == per_slot.reshape(2, case["num_gpus"], -1).sum(axis=2).tolist()


def test_the_recommended_placement_is_written_and_in_use_nothing_is_left_to_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a recording to a placement and back: the plan that is in use already is left alone."""
    path = tmp_path / "placement.json"
    document = replay(
        capsys, ESFT, "--slots", "72", "--ranks", "8", "--max-moves", "100000", "--write-placement", str(path)
    )
    assert document["recommendation"]["action"] == "replicate"
    assert main(["load", ESFT, "--placement", str(path), "--json"]) == 0
    used = json.loads(capsys.readouterr().out)
    best = next(o for o in document["alternatives"] if o["option"] == "replicate")["planner"]
    planned = next(p for p in document["planners"] if p["planner"] == best)
    assert used["balancedness_sum"] == pytest.approx(planned["balancedness_sum"], abs=1e-12)
    again = replay(capsys, ESFT, "--ranks", "8", "--placement", str(path), "--memory-gb", "10.4")
    assert again["recommendation"]["action"] == "do not move"
    missing = tmp_path / "none.json"
    assert main(["replay", ESFT, "--ranks", "8", "--placement", str(path), "--memory-gb", "10.4",
                 "--write-placement", str(missing)]) == 0  # fmt: skip
    assert not missing.exists()
    assert "nothing is to be moved" in capsys.readouterr().err


def test_routes_and_nodes_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two topics of four experts each: with routes ours keeps topics on nodes, and the step gets shorter."""
    random = np.random.default_rng(0)
    topic = np.arange(40_000) % 2
    ids = np.array([[0, 2, 4, 6], [1, 3, 5, 7]])
    chosen = np.stack([random.permutation(ids[t])[:2] for t in topic])[:, None, :]
    counts = np.stack([np.bincount(part.ravel(), minlength=8)[None] for part in np.array_split(chosen, 8)])
    np.savez(tmp_path / "routes.npz", routes=chosen)
    np.savez(tmp_path / "loads.npz", counts=counts)
    document = replay(
        capsys, str(tmp_path / "loads.npz"), "--ranks", "4", "--nodes", "2", "--top-k", "2",
        "--routes", str(tmp_path / "routes.npz"), "--link-gbps", "1", "--min-gain", "0.001",
    )  # fmt: skip
    times = {planner["planner"]: planner["held_out_step_ms"] for planner in document["planners"]}
    assert min(times, key=times.__getitem__) == "moetrace"
    assert times["moetrace"] < 0.75 * times["eplb"]


def test_the_terminal_view(capsys: pytest.CaptureFixture[str]) -> None:
    """People see planners, options, one answer, and every typical value that was assumed."""
    assert main(["replay", ESFT, "--slots", "72", "--ranks", "8"]) == 0
    text = capsys.readouterr().out
    assert "64 experts in 72 slots on 8 ranks of 1 node (today: 64 slots)" in text
    assert "Recommendation: replicate: the placement of planner " in text
    assert "won back within" in text
    assert "Assumed: an expert of a layer weighs 44 MB (--expert-mb)." in text


def test_more_slots_than_today_are_recommended_only_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --slots or --memory-gb the answer keeps today's slots, and says what more would be worth."""
    document = replay(capsys, ESFT, "--ranks", "8")
    assert document["slots"] == 64
    answer = document["recommendation"]
    assert answer["action"] in ("move", "do not move")
    assert answer["slots"] in (64, None)
    replicate = next(o for o in document["alternatives"] if o["option"] == "replicate")
    assert replicate["slots"] == 72
    assert any("72 slots would save" in reason and "--slots 72" in reason for reason in answer["reasons"])
    told = replay(capsys, ESFT, "--ranks", "8", "--memory-gb", "100")
    assert told["recommendation"]["action"] == "replicate"
    assert told["recommendation"]["slots"] == 72


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--slots", "70", "--ranks", "8"],
            "slots = 70 do not divide by ranks = 8: every rank has equally many",
        ),
        (["--slots", "56", "--ranks", "8"], "slots = 56 are fewer than 64 experts"),
        (["--slots", "64"], "the recording does not tell its ranks: give --ranks"),
        (["--ranks", "8", "--nodes", "3"], "nodes = 3 do not divide ranks = 8"),
        (["--ranks", "8", "--groups", "7"], "groups = 7 do not divide 64 experts"),
        (["--ranks", "8", "--memory-gb", "1"], "memory-gb = 1 less reserved-gb = 0 leaves 1.0 GB"),
        (["--ranks", "8", "--memory-gb", "1,2"], "memory-gb tells 2 ranks, there are 8"),
        (["--ranks", "8", "--memory-gb", "much"], "memory-gb = 'much': a number above 0 expected"),
        (["--ranks", "8", "--memory-gb", "9", "--reserved-gb", "9"], "nothing is left for experts"),
        (["--ranks", "8", "--placement", "none.json"], "cannot read none.json"),
        (["--ranks", "8", "--cohort", "chat"], "--cohort chat: no such load"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Exit code 2, one line, no traceback."""
    assert main(["replay", ESFT, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["[[1, 2, -3, 4]]", "[[1, 2, NaN, 4]]", "[[1, 2, Infinity, 4]]", "[[1, 2], [3]]"]
)
def test_loads_that_are_none_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """Negative, NaN, infinite and ragged loads name the file."""
    path = tmp_path / "loads.json"
    path.write_text(text)
    assert main(["replay", str(path), "--ranks", "2"]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert error.count("\n") == 1


def test_placements_of_unknown_ranks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that does not exist, with the layer, the expert and the fix."""
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"expert_ranks": [[0, 1, 9, 0]]}))
    loads = tmp_path / "loads.json"
    loads.write_text("[[1, 2, 3, 4]]")
    assert main(["replay", str(loads), "--ranks", "2", "--placement", str(path)]) == 2
    assert "layer 0 puts expert 2 on rank 9: ranks are 0 to 1" in capsys.readouterr().err
