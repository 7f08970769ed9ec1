"""Every question of the cookbook is run over a store with known answers."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from integration.collector_process import ROOT, collector, moetrace, run_script
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas.clickhouse import cookbook

NAMES = [recipe.name for recipe in cookbook.recipes()]
LISTS = ("runs", "one_step", "missing_ranks", "late_and_rejected")
"""Recipes that list what there is, and are no figures of how the run does."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory filled by cookbook_store."""
    directory = tmp_path_factory.mktemp("cookbook")
    run_script("cookbook_store", directory / "store")
    return directory


@pytest.fixture(scope="module")
def answers(store: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of every recipe, as a reader of the run directory gets them."""
    found = {}
    for name in NAMES:
        given = ("--param", "run=cookbook") if name != "runs" else ()
        done = moetrace("query", "--dir", str(store), "--format", "JSONEachRow", "--cookbook", name, *given)
        assert done.returncode == 0, (name, done.stderr)
        found[name] = [json.loads(line) for line in done.stdout.splitlines()]
    return found


def test_there_are_fifteen_questions_and_each_is_one() -> None:
    """The first line of a recipe is a question; a placeholder has a default, or is the run."""
    assert len(NAMES) >= 15
    for recipe in cookbook.recipes():
        assert recipe.question
        assert set(recipe.placeholders) - set(recipe.defaults) <= {"run"}, recipe.name
        assert set(recipe.defaults) <= set(recipe.placeholders), recipe.name
        assert f"## {recipe.name}\n{recipe.question}" in (ROOT / "schemas" / "QUERIES.md").read_text()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LISTS])
def test_figures_leave_warm_up_out_or_say_that_it_is_in(name: str) -> None:
    """Roll-ups by minute do not tell warm-up apart: what reads them says so. All else leaves it out."""
    recipe = cookbook.recipe(name)
    notes = " ".join(recipe.notes)
    if "_minutes" in recipe.sql:
        assert "warm-up with them: the roll-up by minute does not tell it apart" in notes
    else:
        assert "warmup = " in recipe.sql
        assert re.search(r"warm-up (and steps with missing ranks )?left out", notes)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_an_answer(name: str, answers: dict[str, list[dict[str, Any]]]) -> None:
    """No recipe fails, and none is empty over a run that has what it asks for."""
    assert answers[name]


def test_the_hot_and_the_dead_expert(answers: dict[str, list[dict[str, Any]]]) -> None:
    """Expert 5 has four shares of 18 where the mean is 18 / 16 of one; expert 15 has none."""
    top = answers["hot_experts"][:3]
    assert {(row["expert"], row["forward_mode"]) for row in top} == {(5, "decode")}
    assert top[0]["over_mean"] == pytest.approx(4 * 16 / 18, rel=0.02)
    assert [row["experts"] for row in answers["dead_experts"]] == [[15]] * 3
    row = answers["heat_map"][0]
    assert (len(row["load_by_expert"]), row["load_by_expert"][15]) == (16, 0)


def test_the_slow_rank_and_why(answers: dict[str, list[dict[str, Any]]]) -> None:
    """Rank 7 in expert_gemm of layer 1, by its device, on node1, in the 40 steps from 20 on."""
    steps = answers["steps_of_rank"]
    clear = [row for row in steps if row["evidence"] == "clear"]
    assert len(clear) > 30
    assert {(row["phase"], row["layer"], row["cause"]) for row in clear} == {("expert_gemm", 1, "device")}
    assert min(int(row["step"]) for row in clear) >= 20
    suspect = answers["suspects"][0]
    assert (suspect["rank"], suspect["host"], suspect["phase"]) == (7, "node1", "expert_gemm")
    assert answers["worst_steps"][0]["rank"] == 7
    assert answers["gemm_time_per_row"][0]["rank"] == 7
    assert answers["gemm_time_per_row"][0]["over_expected"] > 1.1
    assert answers["waits_by_rank"][0]["rank"] == 7
    released = [row for row in answers["one_step"] if row["phase"] == "combine"]
    assert len(released) == 3


def test_whom_a_rank_waited_for(answers: dict[str, list[dict[str, Any]]]) -> None:
    """Rank 0 waited for rank 7 ten times as long as for each of the six others; itself is left out."""
    for phase in ("dispatch", "combine"):
        found = [row for row in answers["kernel_waits"] if row["phase"] == phase]
        assert sorted(row["waited_for_rank"] for row in found) == [1, 2, 3, 4, 5, 6, 7]
        assert found[0]["waited_for_rank"] == 7
        assert int(found[0]["waited_cycles"]) == (60 - 2) * 1000, "two steps of warm-up are left out"
        assert found[0]["part"] == pytest.approx(1000 / 1600, abs=1e-4)


def test_parts_add_up(answers: dict[str, list[dict[str, Any]]]) -> None:
    """Phases of the frontier are all of it; rows by scope are all rows; four of eight ranks are near."""
    assert sum(row["part"] for row in answers["time_by_phase"]) == pytest.approx(1.0, abs=1e-3)
    shares = {row["scope"]: row["share"] for row in answers["cross_node_share"] if row["phase"] == "dispatch"}
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-3)
    assert shares["cross_node"] == pytest.approx(0.5, abs=0.1)


def test_told_and_expected_rows(answers: dict[str, list[dict[str, Any]]]) -> None:
    """Experts 4 and 5 have five shares of 18, on rank 2; four of 284 pairs were dropped, and sent."""
    rows = answers["expected_traffic"]
    assert {row["destination_ep_rank"] for row in rows} == {2}
    for row in rows:
        assert row["told_of_expected"] == pytest.approx(1 + 4 / 280, abs=0.01)


def test_placements_and_missing_ranks(answers: dict[str, list[dict[str, Any]]]) -> None:
    """38 counted steps before the change, 16 whole ones after; rank 3 missed four steps and was late once."""
    placements = [
        (row["placement_version"], int(row["steps"])) for row in answers["before_and_after_placement"]
    ]
    assert placements == [(1, 38), (2, 16)]
    [missing] = answers["missing_ranks"]
    assert (
        missing["rank"],
        int(missing["steps"]),
        int(missing["first_step"]),
        int(missing["last_step"]),
    ) == (
        3,
        4,
        50,
        53,
    )
    [late] = answers["late_and_rejected"]
    assert (late["kind"], late["rank"], int(late["events"])) == ("late", 3, 1)
    [run] = answers["runs"]
    assert (run["run_id"], run["model_names"], run["placement_versions"]) == (
        "cookbook",
        ["tiny-moe"],
        [1, 2],
    )


def test_drops_and_activated_experts(answers: dict[str, list[dict[str, Any]]]) -> None:
    """4 pairs of 1,024 per rank and layer are dropped; a rank wakes its two experts, the last only one."""
    assert {row["of_routed"] for row in answers["dropped_tokens"]} == {round(4 / 1024, 6)}
    activated = {(row["rank"], row["layer"]): row["mean_activated"] for row in answers["activated_experts"]}
    assert activated[0, 0] == 2
    assert activated[7, 0] == 1


def test_exchanges_by_layer_and_minute(answers: dict[str, list[dict[str, Any]]]) -> None:
    """Percentiles are in order, and the roll-up counts every exchange."""
    for row in answers["exchange_percentiles"]:
        assert row["p50_us"] <= row["p95_us"] <= row["p99_us"]
        assert int(row["exchanges"]) == 58  # the two steps of warm-up are left out
    over_time = answers["transfers_over_time"]
    assert sum(int(row["number"]) for row in over_time) == 60 * 3 * 2
    assert all(not isinstance(value, list | dict) for row in over_time for value in row.values())
    assert all(row["mean_us"] * 0.9 < row["p95_us"] <= row["longest_us"] * 1.05 for row in over_time)


def test_step_times(answers: dict[str, list[dict[str, Any]]]) -> None:
    """54 steps are whole and no warm-up; percentiles are in order."""
    [steps] = answers["step_percentiles"]
    assert (steps["forward_mode"], int(steps["steps"])) == ("decode", 54)
    assert steps["p50_ms"] <= steps["p95_ms"] <= steps["p99_ms"]


def test_the_list_names_every_recipe() -> None:
    """`moetrace query --cookbook` needs no store."""
    done = moetrace("query", "--cookbook")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == NAMES


def test_the_cookbook_works_through_a_running_collector(tmp_path: Path) -> None:
    """Over HTTP, with the newest run found by itself and parameters bound by the engine."""
    run = SyntheticRun(run_id="it's; new", world_size=2, slow_rank=1)
    with collector(tmp_path) as process:
        for step in range(12):
            assert (
                process.send(request(SyntheticRun(run_id="new", world_size=2, slow_rank=1).step(step))).status
                == 200
            )
        deadline = time.monotonic() + 60
        count = b"SELECT count() FROM moetrace.step_verdicts FINAL"
        while process.post(count, path="/", content_type="text/plain").body != b"12\n":
            assert time.monotonic() < deadline, "the verdicts are not stored"
            time.sleep(0.1)
        for target in (("--url", process.http_address), ("--dir", str(tmp_path))):
            done = moetrace(
                "query",
                *target,
                "--cookbook",
                "steps-of-rank",
                "--param",
                "rank=1",
                "--format",
                "JSONEachRow",
            )
            assert done.returncode == 0, done.stderr
            assert {json.loads(line)["phase"] for line in done.stdout.splitlines()} == {"expert_gemm"}
        odd = moetrace(
            "query", "--url", process.http_address, "--param", f"run={run.run_id}\t\\n",
            "--format", "TSVRaw", "SELECT {run:String}",
        )  # fmt: skip
        assert odd.stdout == f"{run.run_id}\t\\n\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "what to ask? give SQL, or --cookbook NAME"),
        (("SELECT 1", "--cookbook", "runs"), "what to ask? give SQL, or --cookbook NAME"),
        (("--cookbook", "nothing"), "no recipe 'nothing' in the cookbook: activated_experts, "),
        (("--cookbook", "runs", "--param", "rank=1"), "recipe runs takes no rank: none expected"),
        (("--cookbook", "runs", "--param", "rank"), "--param rank: NAME=VALUE expected"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    """A mistake is one line that names it, and exit code 2."""
    done = moetrace("query", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
