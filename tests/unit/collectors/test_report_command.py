"""`moetrace report` over a store of known content: the document, the terminal, the page, the errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import hand_made_run
from moetrace_collectors.commands.suggestions import worst_steps
from moetrace_collectors.run_directory import RunDirectory, report_name
from moetrace_collectors.views.document import document_schema
from moetrace_schemas import enums


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run of the command left."""

    code: int
    out: str
    err: str


def report(*arguments: str, cwd: Path | None = None) -> Result:
    """The command in a process of its own: the embedded engine serves one path per process."""
    done = subprocess.run(
        [sys.executable, "-m", "moetrace_collectors.cli", "report", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
    )
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the hand-made run."""
    path = tmp_path_factory.mktemp("runs") / "hand-made"
    path.mkdir()
    script = Path(hand_made_run.__file__)
    subprocess.run([sys.executable, str(script), str(path / "store")], check=True, timeout=120)
    return path


@pytest.fixture(scope="module")
def document(directory: Path) -> dict[str, Any]:
    """The document of the hand-made run."""
    result = report("--dir", str(directory), "--json")
    assert result.code == 0, result.err
    parsed: dict[str, Any] = json.loads(result.out)
    return parsed


@pytest.fixture(scope="module")
def page(document: dict[str, Any]) -> str:
    """The page of the hand-made run."""
    return Path(document["report"]).read_text(encoding="utf-8")


def test_document_matches_its_published_schema(document: dict[str, Any]) -> None:
    """What the command prints is what the schema promises, with nothing besides."""
    Draft202012Validator.check_schema(document_schema())
    Draft202012Validator(document_schema()).validate(document)


def test_document_names_the_run(document: dict[str, Any], directory: Path) -> None:
    """Identity, size, and where things lie."""
    assert document["run_id"] == hand_made_run.RUN_ID
    assert document["model"] == {"name": hand_made_run.MODEL_NAME, "version": "7"}
    assert (document["ranks"], document["steps"], document["warmup_steps"]) == (3, 7, 1)
    assert document["store"] == str(directory / "store")
    assert document["report"] == str(directory / report_name(hand_made_run.RUN_ID))


def test_verdicts_are_one_per_step_though_rows_came_twice(document: dict[str, Any]) -> None:
    """A row that was delivered twice is one verdict, in step order."""
    assert [verdict["step"] for verdict in document["verdicts"]] == list(range(7))


def test_verdict_carries_suspect_and_runner_up(document: dict[str, Any]) -> None:
    """Rank, layer, phase, cause, worth and share of a named step, and who came second."""
    verdict = document["verdicts"][3]
    named = {
        key: verdict[key] for key in ("rank", "layer", "phase", "cause", "worth_ms", "share", "evidence")
    }
    assert named == {
        "rank": 2,
        "layer": 1,
        "phase": "expert_gemm",
        "cause": "device",
        "worth_ms": 40.0,
        "share": 0.8,
        "evidence": "clear",
    }
    assert verdict["runner_up"] == {
        "rank": 1,
        "layer": None,
        "phase": "permute",
        "worth_ms": 5.0,
        "share": 0.1,
    }


def test_unnamed_step_has_nulls_and_its_missing_rank(document: dict[str, Any]) -> None:
    """A step that names no rank says so with nulls, and which rank it misses."""
    verdict = document["verdicts"][6]
    assert (verdict["rank"], verdict["phase"], verdict["runner_up"]) == (None, None, None)
    assert verdict["missing_ranks"] == [1]
    assert verdict["closed_by"] == "timeout"


def test_summary_counts_without_warmup(document: dict[str, Any]) -> None:
    """Findings, shares and evidence are of steps 1 to 6."""
    summary = document["summary"]
    assert summary["headline"] == (
        "Rank 2 in expert_gemm (mostly layer 1) extended 67 % of steps by a median 30.0 ms; "
        "cause: device in 75 %, unknown in 25 %; evidence clear."
    )
    assert summary["counted_steps"] == 6
    assert summary["evidence"] == {"clear": 4, "ambiguous": 1, "insufficient": 1}
    assert summary["worst_step"] == 3
    found = [
        (f["rank"], f["phase"], f["cause"], f["steps"], f["worth_ms_total"]) for f in summary["findings"]
    ]
    assert found == [
        (2, "expert_gemm", "device", 3, 90.0),
        (2, "expert_gemm", "unknown", 1, 30.0),
        (0, "outside", "outside", 1, 10.0),
    ]


def test_imbalance_is_of_counted_steps(document: dict[str, Any]) -> None:
    """Layer 0 is even, layer 1 has a hot expert at 2.8 times the mean; the warm-up's counts are not in it."""
    rows = {
        (row["forward_mode"], row["cohort"], row["layer"]): row
        for row in document["imbalance"]
        if row["cohort"] is None
    }
    assert set(rows) == {(mode, None, layer) for mode in ("prefill", "decode") for layer in (0, 1)}
    even, skewed = rows["prefill", None, 0], rows["prefill", None, 1]
    assert (even["max_mean_ratio"], even["cv"], even["dead_experts"]) == (1.0, 0.0, 0)
    assert (skewed["max_mean_ratio"], skewed["hot_expert"]) == (2.8, 3)
    assert skewed["cv"] == pytest.approx((3 * 15**2 + 45**2) ** 0.5 / 2 / 25, abs=1e-6)
    assert skewed["pairs"] == 100 * (4 * 3 + 2)
    assert skewed["step_p95_max_mean_ratio"] == pytest.approx(2.8)


def test_missing_rank_is_no_light_rank(document: dict[str, Any]) -> None:
    """Ranks are compared over the steps that miss none: the rank that step 6 misses does not look idle."""
    ratios = {row["rank_max_mean_ratio"] for row in document["imbalance"]}
    assert ratios == {1.0}


def test_cohorts_stand_beside_the_whole(document: dict[str, Any]) -> None:
    """Where a mode has two cohorts, each has its own rows, and they add up."""
    pairs = {
        row["cohort"]: row["pairs"]
        for row in document["imbalance"]
        if row["forward_mode"] == "prefill" and row["layer"] == 1
    }
    assert set(pairs) == {None, "prose", "code"}
    assert pairs[None] == pairs["prose"] + pairs["code"]


def test_accounting_tells_what_arrived(document: dict[str, Any]) -> None:
    """Counts by kind and reason, closings, missing ranks; another run's events are not ours."""
    accounting = document["accounting"]
    assert accounting["rank_steps"] == 20
    assert accounting["duplicate"] == 1
    assert accounting["rejected"] == 0
    assert accounting["rejected_without_run"] == 1
    assert accounting["steps_by_closed_by"] == {"complete": 6, "timeout": 1}
    assert accounting["missing_steps_by_rank"] == [{"rank": 1, "steps": 1}]
    assert accounting["pairs_by_kind"]["padding"] == 8 * 17
    assert accounting["tracer_drops"] is None


def test_schema_knows_the_closed_sets() -> None:
    """The schema lists exactly the members of the generated enums."""
    definitions = document_schema()["$defs"]
    for name, members in (
        ("phase", enums.Phase),
        ("cause", enums.Cause),
        ("evidence", enums.Evidence),
        ("forward_mode", enums.ForwardMode),
        ("closed_by", enums.ClosedBy),
    ):
        assert definitions[name]["enum"] == [str(member) for member in members]


def test_schema_describes_every_property() -> None:
    """Every property has a description, and no object takes properties that it does not list."""

    def check(node: dict[str, Any], path: str) -> None:
        if node.get("properties"):
            assert node["additionalProperties"] is False, path
        for name, child in node.get("properties", {}).items():
            described = "description" in child or "$ref" in child
            assert described, f"{path}.{name}"
            check(child, f"{path}.{name}")
        if "items" in node:
            check(node["items"], f"{path}[]")

    schema = document_schema()
    check(schema, "$")
    for name, definition in schema["$defs"].items():
        assert definition.get("description"), name
        check(definition, name)


def test_terminal_view_ends_with_paths(directory: Path) -> None:
    """Without --json the command prints the findings, and where store and report are."""
    result = report("--dir", str(directory))
    assert result.code == 0
    assert "cause: device in 75 %, unknown in 25 %; evidence clear." in result.out
    assert f"report  {directory / report_name(hand_made_run.RUN_ID)}" in result.out
    assert "\x1b" not in result.out


def test_page_draws_the_worst_step(page: str) -> None:
    """The timeline shows the waits of ranks 0 and 1 for rank 2, apart from the transfer."""
    assert "Step 3 across ranks" in page
    waits = re.findall(r"<title>combine: wait for the others, layer 1: (.*?)</title>", page)
    assert waits == ["30.0 ms", "28.0 ms"]
    assert page.count("<title>combine: transfer, layer 1: 2.00 ms</title>") == 3
    assert "critical: rank 2, most of all in expert_gemm, before the exchange in layer 1: 20.0 ms" in page


def test_page_compares_ranks_on_one_time_axis(page: str) -> None:
    """Though two clocks are wrong by milliseconds, the ends of an exchange are at one place."""
    ends = set()
    for match in re.finditer(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"[^>]*class="p-combine"', page):
        ends.add(round(float(match[1]) + float(match[2])))
    assert len(ends) == 2


def test_page_carries_the_traffic_and_the_loads(page: str) -> None:
    """Rank x rank bytes and layer x expert counts lie in the page as in the store."""
    traffic = re.search(r'id="traffic-map-data">(.*?)</script>', page)
    assert traffic is not None
    assert json.loads(traffic[1])["values"] == [[8 * 5, 16 * 5, 24 * 5]] * 3
    experts = re.search(r'id="experts-1-data">(.*?)</script>', page)
    assert experts is not None
    assert json.loads(experts[1])["values"][1] == [140, 140, 140, 980]


def test_page_shows_hostile_names_as_text(page: str) -> None:
    """The run id and the model name of the store, both full of markup, are text in the page."""
    assert "<script>alert(1)" not in page
    assert "<img" not in page
    assert "run &lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_chosen_step_is_drawn(directory: Path, tmp_path: Path) -> None:
    """--step draws that step; one whose phase rows are gone says so."""
    out = tmp_path / "step.html"
    result = report("--dir", str(directory), "--step", "5", "--out", str(out), "--json")
    assert json.loads(result.out)["summary"]["worst_step"] == 5
    assert "The phase rows of this step are not in the store." in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dir", "DIR", "--run", "nope"], "holds no run 'nope': it holds run <script>"),
        (["--dir", "DIR", "--step", "99"], "step 99 is not among the run's joined steps (0 to 6)"),
        (
            ["--dir", "DIR", "--out", "/nowhere/r.html"],
            "cannot write /nowhere/r.html: /nowhere is not a directory",
        ),
        (["--dir", "DIR", "--out", "DIR"], "it is a directory; give a file with --out"),
        (["--dir", "/nowhere"], "/nowhere is not a directory: give a run directory with --dir"),
        (["--dsn", "chdb:///nowhere/store"], "no store at /nowhere/store"),
        (["--dir", "\udcff"], "argument 3 (?): text in UTF-8 expected"),
        (["--dir", "DIR", "--run", "r" * 9000], f"holds no run '{'r' * 128}...': it holds"),
        (
            ["--dsn", "mysql://x"],
            "chdb:///absolute/path, clickhouse://host:8123 or https://host:8443 expected",
        ),
        (["--url", "localhost:4318"], "a collector's address expected, as in http://127.0.0.1:4318"),
        (["--url", "http://127.0.0.1:1"], "no collector answers at http://127.0.0.1:1"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(directory: Path, arguments: list[str], message: str) -> None:
    """The line names what is wrong, where, and the fix; nothing is printed to stdout."""
    result = report(*(argument.replace("DIR", str(directory)) for argument in arguments))
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


def test_store_without_tables_says_so(tmp_path: Path) -> None:
    """A store into which nothing was ever written is told from a missing one, in one line."""
    (tmp_path / "store").mkdir()
    result = report("--dir", str(tmp_path))
    assert result.code == 2
    assert "holds no tables of moetrace in database moetrace" in result.err
    assert result.err.count("\n") == 1


def test_a_folder_of_runs_lists_them(directory: Path, tmp_path: Path) -> None:
    """The store lies one level below: the message names the runs there and how to call for one."""
    shutil.copytree(directory, tmp_path / "run-a", symlinks=True)
    result = report("--dir", str(tmp_path))
    assert result.code == 2
    assert (
        f"holds run-a/ and no store/ itself: give one of them, as in --dir {tmp_path / 'run-a'}" in result.err
    )


@pytest.mark.parametrize("option", ["-o", "--output", "--out"])
def test_the_page_goes_where_it_is_asked_for(directory: Path, tmp_path: Path, option: str) -> None:
    """Under each name of the option; the terminal says where."""
    out = tmp_path / "page.html"
    result = report("--dir", str(directory), option, str(out))
    assert (result.code, out.is_file()) == (0, True)
    assert str(out) in result.out
    assert "steps 1 to 6: 6 recorded of 6, 1 of warm-up left out" in result.out


def test_a_page_of_a_store_elsewhere_says_its_whole_path(directory: Path, tmp_path: Path) -> None:
    """Without a run directory the page lies where the command was called; the path is printed whole."""
    result = report("--dsn", f"chdb://{directory / 'store'}", cwd=tmp_path)
    assert str(tmp_path / report_name(hand_made_run.RUN_ID)) in result.out


def test_a_damaged_store_is_not_called_empty(directory: Path, tmp_path: Path) -> None:
    """What the engine set aside is said: beside the figures, and instead of `nothing has been stored`."""
    copied = tmp_path / "damaged"
    shutil.copytree(directory, copied, symlinks=True)
    parts = sorted(path for path in (copied / "store").rglob("data.bin") if "system" not in str(path))
    assert parts
    for path in parts:
        path.write_bytes(b"garbage")
    result = report("--dir", str(copied))
    assert result.code == 2
    assert "holds no run yet: " in result.err
    assert "did not read and lie aside (detached/ in the store): their rows are in no figure" in result.err
    assert "nothing has been stored" not in result.err


def test_newest_run_directory_is_the_default(directory: Path, tmp_path: Path) -> None:
    """Without --dir the newest run under moetrace-runs is shown, and its report lies beside its store."""
    runs = tmp_path / "moetrace-runs"
    runs.mkdir()
    result = report(cwd=tmp_path)
    assert result.code == 2
    assert "no run directory under moetrace-runs/: run moetrace demo first" in result.err
    shutil.copytree(directory, runs / "only", symlinks=True)
    page = runs / "only" / report_name(hand_made_run.RUN_ID)
    page.unlink(missing_ok=True)
    assert report(cwd=tmp_path).code == 0
    assert page.is_file()


def test_reports_of_several_runs_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """The run that a directory is named after has report.html; every other run a name of its own."""
    directory = RunDirectory(path=tmp_path / "run-7")
    assert directory.report_path("run-7").name == "report.html"
    others = ["run-8", "run:8", "run_8", "a/../../b", "r" * 300, "s" * 300]
    paths = [directory.report_path(run_id) for run_id in others]
    assert len(set(paths)) == len(others)
    assert {path.parent for path in paths} == {directory.path}
    assert directory.report_path("run-8").name == "report-run-8.html"


def test_the_suggested_query_is_one_text_everywhere(directory: Path) -> None:
    """The report suggests what README and the collector's README show; a run is named where it can be."""
    columns = "SELECT step, evidence, rank, layer, phase, cause, worth_ns FROM step_verdicts "
    order = "ORDER BY worth_ns DESC LIMIT 10"
    assert worst_steps("--dir x").endswith(f'query --dir x "{columns}{order}"')
    assert f"{columns}WHERE run_id = 'run-8' {order}" in worst_steps("--dir x", "run-8")
    assert f'"{columns}{order}"' in report("--dir", str(directory)).out
    root = Path(__file__).parents[3]
    for name in ("README.md", "collectors/README.md"):
        assert f'"{columns}{order}"' in (root / name).read_text()
