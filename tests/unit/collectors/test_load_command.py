"""`moetrace load`: what is printed and written, against its published schema; errors in one line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from moetrace_collectors.cli import main

DATA = Path(__file__).parents[2] / "data" / "loads"
TESTS = Path(__file__).parents[2]
ESFT = str(DATA / "esft_law_counts.json")
MODELS = str(DATA / "olmoe_mixtral_counts.json")
KNOWN = json.loads((DATA / "esft_law_expected.json").read_text())


def schema(name: str) -> dict[str, Any]:
    """A published schema."""
    text = resources.files("moetrace_schemas.json").joinpath(name).read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def load(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The document of one call, valid against its schema."""
    assert main(["load", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema("load_result.schema.json")).validate(document)
    return document


def test_the_schema_is_one() -> None:
    """The published schema is valid itself."""
    jsonschema.Draft202012Validator.check_schema(schema("load_result.schema.json"))


def test_a_recorded_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Every promised field, with the known values."""
    document = load(capsys, ESFT, "--ranks", "8")
    known = KNOWN["contiguous_ep8"]
    assert [layer["rank_loads"] for layer in document["layers"]] == known["rank_loads"]
    assert [layer["critical_rank"] for layer in document["layers"]] == known["critical_rank_per_layer"]
    assert document["balancedness_sum"] == pytest.approx(known["vllm_style"], abs=1e-9)
    assert document["balancedness_mean"] == pytest.approx(np.mean(known["balancedness"]), abs=1e-9)
    for layer, expected in zip(document["layers"], KNOWN["per_layer"], strict=True):
        assert layer["max_mean_ratio"] == pytest.approx(expected["max_over_mean"], abs=1e-9)
        assert layer["gini"] == pytest.approx(expected["gini"], abs=1e-9)
        assert layer["hot_experts"][0]["expert"] == expected["argmax"]
    assert document["steps"] == 33
    per_step = {item["name"]: item["value_per_step"] for item in document["balancedness_definitions"]}
    steps = known["sum_over_steps_of_mean"] / known["sum_over_steps_of_max"]
    assert per_step["balancedness_sum"] == pytest.approx(steps, abs=1e-9)


def test_named_recordings_and_ranks_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """One recording by its name; without ranks balance is that of experts, and a warning says so."""
    document = load(capsys, f"{MODELS}#mixtral-8x7b/book")
    assert document["experts"] == 8
    assert document["balancedness_level"] == "expert"
    assert document["layers"][0]["rank_loads"] is None
    assert any("ranks are unknown" in warning for warning in document["warnings"])
    assert document["other_views"] == []
    everything = load(capsys, MODELS)
    assert len(everything["other_views"]) == 3
    chosen = load(capsys, MODELS, "--cohort", "olmoe/book", "--ranks", "4")
    expected = json.loads((DATA / "olmoe_mixtral_expected.json").read_text())["olmoe/book"]
    assert [layer["rank_loads"] for layer in chosen["layers"]] == expected["contiguous_ep4"]["rank_loads"]


def test_arrays_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """[layers, experts] and [steps, layers, experts], from JSON and NPZ."""
    path = tmp_path / "loads.json"
    path.write_text(json.dumps([[10, 20, 30, 40], [1, 2, 3, 4], [50, 50, 50, 50]]))
    document = load(capsys, str(path), "--ranks", "2")
    assert document["balancedness_sum"] == pytest.approx(155 / 177, abs=1e-12)
    assert [layer["balancedness"] for layer in document["layers"]] == [50 / 70, 5 / 7, 1.0]
    np.savez(tmp_path / "loads.npz", counts=np.ones((5, 2, 4), dtype=np.int64))
    assert load(capsys, str(tmp_path / "loads.npz"), "--ranks", "2")["steps"] == 5


def test_a_placement_and_routes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replicas share through the placement, and pairs that cross nodes are named."""
    loads, placement, routes = tmp_path / "loads.json", tmp_path / "placement.json", tmp_path / "routes.npz"
    loads.write_text(json.dumps({"counts": [[8, 2, 2]], "top_k": 2}))
    placement.write_text(json.dumps({"physical_to_logical": [[0, 1, 0, 2]], "ranks": 2}))
    np.savez(routes, routes=np.array([[[0, 1]], [[1, 2]]]))
    document = load(
        capsys, str(loads), "--placement", str(placement), "--routes", str(routes), "--nodes", "2"
    )
    assert document["layers"][0]["rank_loads"] == [6, 6]
    assert document["rank_loads_from"] == "placement"
    pairs = {tuple(pair["experts"]): pair["cross_node"] for pair in document["coactivation"]["top_pairs"]}
    assert pairs == {(0, 1): 0.5, (1, 2): 1.0}
    assert document["coactivation"]["cross_node_share"] == [0.75]


def test_hot_spots_over_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With times a hot rank that stays is found, in the words of its state."""
    path = tmp_path / "loads.json"
    path.write_text(json.dumps([[[90, 10, 10, 10]]] * 12))
    document = load(capsys, str(path), "--ranks", "4", "--seconds-per-step", "30")
    (spot,) = document["hot_spots"]
    assert (spot["state"], spot["fired"], spot["fired_at_unix_s"], spot["rank"]) == ("hot", 1, [180.0], 0)
    assert load(capsys, str(path), "--ranks", "4")["hot_spots"] is None


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_shapes_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    """Grouped-GEMM problems with their weights, as JSON and as CSV."""
    out = tmp_path / f"shapes{suffix}"
    arguments = ["--ranks", "8", "--export-shapes", str(out), "--shapes", "10", "--hidden", "2048"]
    load(capsys, ESFT, *arguments, "--intermediate", "1408")
    if suffix == ".json":
        shapes = json.loads(out.read_text())
        assert sum(problem["weight"] for problem in shapes["problems"]) == 33 * 26 * 8
        assert (shapes["n"], shapes["k"], len(shapes["problems"])) == (1408, 2048, 10)
        assert sum(entry["count"] for entry in shapes["histogram"]) == 33 * 26 * 64
    else:
        rows = list(csv.DictReader(out.read_text().splitlines()))
        assert len(rows) == 10 * 8
        assert {row["k"] for row in rows} == {"2048"}


def test_the_terminal_view(capsys: pytest.CaptureFixture[str]) -> None:
    """People see layers, the definitions with their users, and what was left open."""
    assert main(["load", ESFT, "--ranks", "8"]) == 0
    text = capsys.readouterr().out
    assert "26 layers, 64 experts, 8 ranks" in text
    assert "balancedness_sum    0.7219" in text
    assert "TensorRT-LLM" in text
    assert "2 better balanced layers not listed: --json has all" in text
    assert "Figures: steps 0 to 32: 33 recorded of 33, warm-up is not told apart" in text


def test_one_rank_has_no_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to send and no fullest rank; the line says that instead of figures."""
    assert main(["load", ESFT, "--ranks", "1"]) == 0
    text = capsys.readouterr().out
    assert "26 layers, 64 experts, 1 rank on 1 node" in text
    assert "Exchange: none, there is one rank." in text
    assert "leave their node" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to read: give a dump as PATH, or a recorded run with --run RUN"),
        (["nowhere.json"], "cannot read nowhere.json"),
        ([ESFT, "--run", "r"], "and --run: give a dump or a run, not both"),
        ([ESFT, "--ranks", "7"], "ranks = 7 do not divide 64 experts"),
        ([ESFT, "--ranks", "8", "--nodes", "3"], "nodes = 3 do not divide ranks = 8"),
        ([ESFT, "--forward-mode", "decode"], "--forward-mode decode: no such load"),
        ([f"{MODELS}#none"], "holds no recording 'none': it holds olmoe/c4"),
        ([ESFT, "--export-shapes", "x.txt"], "a name that ends in .json or .csv expected"),
        ([ESFT, "--export-shapes", "x.csv"], "needs to know ranks: give --ranks or --placement"),
        ([ESFT, "--hot-spots", "none.toml"], "cannot read none.toml"),
        ([ESFT, "--routes", "none.npz"], "cannot read none.npz"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Exit code 2, one line, no traceback."""
    assert main(["load", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_empty_loads_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All zeros is no load."""
    path = tmp_path / "zeros.json"
    path.write_text("[[0, 0], [0, 0]]")
    assert main(["load", str(path)]) == 2
    assert "every count is 0" in capsys.readouterr().err


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run in an embedded store, written by a process of its own."""
    directory = tmp_path_factory.mktemp("run")
    subprocess.run(
        [sys.executable, "-m", "simulated_store", str(directory / "store")],
        check=True,
        cwd=TESTS,
        timeout=120,
    )
    return directory


def moetrace(*arguments: str) -> dict[str, Any]:
    """The document of a command in a process of its own: the engine serves one path per process."""
    done = subprocess.run(
        [sys.executable, "-m", "moetrace_collectors.cli", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_run_from_the_store(store: Path) -> None:
    """Ranks, nodes, received rows, exchanges and forward mode come from the store, warm-up is left out."""
    document = moetrace("load", "--dir", str(store), "--run", "simulated")
    jsonschema.Draft202012Validator(schema("load_result.schema.json")).validate(document)
    assert document["forward_mode"] == "prefill"
    assert (document["steps"], document["ranks"], document["nodes"]) == (20, 8, 2)
    assert document["rank_loads_from"] == "measured"
    pairs = 20 * 8 * 512 * 2
    for layer in document["layers"]:
        assert layer["tokens"] == sum(layer["rank_loads"]) == pairs
        assert layer["critical_rank"] == 0
        assert {hot["expert"] for hot in layer["hot_experts"][:2]} == {0, 1}
        assert layer["stability"]["kind"] == "stable"
    sent = document["communication"]
    assert sent["measured"]
    assert sum(map(sum, sent["rows"])) == 3 * pairs
    assert sent["layers"][0]["cross_node_ratio"] == pytest.approx(0.5, abs=0.05)
    for layer, exchange in zip(document["layers"], sent["layers"], strict=True):
        loads = np.array(layer["rank_loads"], dtype=float)
        figures = layer["rank_figures"]
        assert (figures["total"], figures["max"], figures["idle"]) == (pairs, loads.max(), 0)
        assert figures["cv"] == pytest.approx(loads.std() / loads.mean(), abs=1e-9)
        share = loads / loads.sum()
        assert figures["entropy_bits"] == pytest.approx(-(share * np.log2(share)).sum(), abs=1e-9)
        assert figures["percentiles"]["p50"] == pytest.approx(np.median(loads))
        # What ranks keep for themselves crosses nothing.
        assert 0 < exchange["received"]["total"] < pairs
        assert exchange["received"]["max_mean_ratio"] == exchange["received_max_mean_ratio"]
        assert exchange["bytes"] == pairs * 4096


def test_a_recommendation_from_the_store(store: Path) -> None:
    """Experts' time, step time and row size are the recorded ones, and the hot rank is worth a move."""
    document = moetrace("replay", "--dir", str(store), "--slots", "24", "--top-k", "2")
    jsonschema.Draft202012Validator(schema("replay_result.schema.json")).validate(document)
    costs = document["costs"]
    assert costs["times"] == "fitted"
    assert costs["gemm_us_per_row"] == pytest.approx(0.06, rel=0.1)
    assert costs["row_bytes"] == 4096
    assert costs["step_ms"] == pytest.approx(4.0, rel=0.1)
    assert document["recommendation"]["action"] in ("move", "replicate")
    assert not any("per row" in assumption for assumption in document["assumptions"])


def test_planning_uses_the_pairs_that_ranks_sampled(store: Path) -> None:
    """Stored co-activation stands for routes in a file; one copy per pair has no use for it."""
    told = ("replay", "--dir", str(store), "--slots", "24", "--top-k", "2")
    sampled = "experts share tokens as the ranks' samples of this run say (else give --routes)"
    document = moetrace(*told)
    assert document["costs"]["coactivation"]
    assert sampled in document["assumptions"]
    alone = moetrace(*told, "--copies", "pair")
    assert not alone["costs"]["coactivation"]
    assert sampled not in alone["assumptions"]
    # Without a top-k a copy per pair is all that is known, and that is said.
    unknown = moetrace(*told[:-2])
    assert not unknown["costs"]["coactivation"]
    assert any("give --top-k" in warning for warning in unknown["warnings"])
    assert document["placement_version"] == 0


def test_pairs_of_experts_from_the_store(store: Path) -> None:
    """What ranks sampled stands for routes in a file; warm-up steps are left out, layers had their turns."""
    coactivation = moetrace("load", "--dir", str(store), "--run", "simulated")["coactivation"]
    # Experts 0 and 2 are on ranks 0 and 1 of the first node.
    assert [
        (follows["expert"], follows["next_expert"], follows["cross_node"], follows["cross_node_share"])
        for follows in coactivation["across_layers"]
    ] == [(0, 2, 0.0, 0.0)] * 2
    sampled = [sum(step % 3 == layer for step in range(4, 24)) for layer in range(3)]
    assert coactivation["cross_node_share"] == [pytest.approx(1 / 3)] * 3
    pairs = {
        (pair["layer"], *pair["experts"]): (pair["tokens"], pair["cross_node"])
        for pair in coactivation["top_pairs"]
    }
    assert pairs == {
        **{(layer, 0, 1): (10 * count, 0.0) for layer, count in enumerate(sampled)},
        **{(layer, 1, 9): (5 * count, 1.0) for layer, count in enumerate(sampled)},
    }
