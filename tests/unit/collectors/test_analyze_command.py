"""`moetrace analyze`: the known figures of real files, its outputs, and one line for broken input."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from moetrace_collectors.cli import main
from moetrace_collectors.offline.analysis import analyze
from moetrace_collectors.offline.result_document import build_result, result_schema
from moetrace_collectors.offline.result_html import render_result
from moetrace_schemas.enums import Phase
from trace_event_reader import read_trace
from trace_files import moe_traces, write_traces

DATA = Path(__file__).parents[2] / "data"
DLRM = DATA / "kineto" / "dlrm_4ranks"
DECODE = DATA / "kineto" / "vllm_mi300_decode"
ODD = sorted((DATA / "kineto" / "odd").glob("*.gz"))
GLOO = json.loads((DATA / "gloo_runs" / "cases.json").read_text())
MOE_PHASES = {str(phase) for phase in Phase}
VALIDATOR = Draft202012Validator(result_schema())


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run of the command left."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document, which must fit its schema."""
        document: dict[str, Any] = json.loads(self.out)
        VALIDATOR.validate(document)
        return document


class Command:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Result:
        """One run."""
        code = main(["analyze", *map(str, arguments)])
        captured = self._capsys.readouterr()
        return Result(code=code, out=captured.out, err=captured.err)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command."""
    return Command(capsys)


def test_schema_is_a_schema() -> None:
    """Draft 2020-12, every field described."""
    Draft202012Validator.check_schema(result_schema())
    assert all("description" in field for field in result_schema()["properties"].values())


def test_real_ranks_with_all_to_alls(command: Command) -> None:
    """Durations, waits, transfer, releaser of each collective; no phase, no verdict, missing ranks said."""
    result = command(DLRM, "--json")
    assert result.code == 0
    document = result.document
    assert document["ranks"] == [0, 1, 2, 3]
    assert document["steps"] == [10]
    expected = json.loads((DLRM / "expected.json").read_text())["collectives"]
    for one, known in zip(document["collectives"], expected, strict=True):
        durations = known["duration_us"]
        assert (one["index"], one["kind"]) == (known["index"], known["kind"])
        assert one["duration_us"] == {str(rank): value for rank, value in enumerate(durations)}
        assert one["transfer_us"] == min(durations)
        assert one["wait_us"] == {str(rank): value - min(durations) for rank, value in enumerate(durations)}
        assert one["releaser"] == known["least_waiting_rank"]
    assert [one["rank"] for one in document["alignment"]] == [0, 1, 2, 3]
    assert all(abs(one["offset_ns"]) < 10_000 for one in document["alignment"])
    assert not any(MOE_PHASES & set(phases) for phases in document["phases"].values())
    assert document["verdicts"] == []
    assert any("ranks 4, 5, 6, 7 of the job are not among the files" in w for w in document["warnings"])


def shifted(path: Path, directory: Path, *, offset_us: float, drift: float) -> Path:
    """A copy of a trace by another clock."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    first = min(event["ts"] for event in trace["traceEvents"])
    for event in trace["traceEvents"]:
        event["ts"] += offset_us + (event["ts"] - first) * drift
    copy = directory / path.name
    copy.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return copy


def test_shifted_files_come_back(command: Command, tmp_path: Path) -> None:
    """Clocks wrong by up to 3 s that drift by 50 ppm: offsets to within 10 us, releasers as before."""
    offsets = {0: 0.0, 1: 3e6, 2: -3e6, 3: 1.234567e6}
    for rank, offset in offsets.items():
        shifted(DLRM / f"rank{rank}.json.gz", tmp_path, offset_us=offset, drift=50e-6 if rank else 0.0)
    document = command(tmp_path, "--json").document
    for one in document["alignment"]:
        assert abs(one["offset_ns"] - offsets[one["rank"]] * 1000) < 10_000
        assert one["error_ns"] < 10_000
    expected = json.loads((DLRM / "expected.json").read_text())["collectives"]
    assert [c["releaser"] for c in document["collectives"]] == [c["least_waiting_rank"] for c in expected]


def test_decode_step(command: Command) -> None:
    """Phases, busy and idle of the published decode step; one rank claims no critical rank."""
    document = command(DECODE / "graph_execution.json.gz", "--json").document
    expected = json.loads((DECODE / "expected.json").read_text())
    phases = document["phases"]["0"]
    for name, known in expected["phases"].items():
        found = phases["unpermute" if name == "combine_unpermute" else name]
        assert found == {"kernels": known["n"], "us": pytest.approx(known["us"], abs=0.001)}
    assert document["busy_us"]["0"] == pytest.approx(expected["busy_us"], abs=0.02)
    assert document["idle_us"]["0"] == pytest.approx(expected["idle_us"], abs=0.02)
    assert document["exposed_communication_us"]["0"] == 0
    assert document["moe_layers"]["0"] == 24
    assert document["verdicts"] == []


def test_decode_step_beside_the_published_tables(command: Command) -> None:
    """Busy, idle and copy times of the timeline, and the kernels of both expert products and their time.

    The tables were made with floats that hold less than a nanosecond's digits.
    """
    document = command(DECODE / "graph_execution.json.gz", "--json").document
    phases = document["phases"]["0"]
    with (DECODE / "gpu_timeline.csv").open() as file:
        published_us = {row["type"]: 1000 * float(row["time ms"]) for row in csv.DictReader(file)}
    assert document["busy_us"]["0"] == pytest.approx(published_us["busy_time"], abs=0.02)
    assert document["idle_us"]["0"] == pytest.approx(published_us["idle_time"], abs=0.02)
    assert document["exposed_communication_us"]["0"] == published_us["exposed_comm_time"] == 0
    assert phases["memcpy"]["us"] == pytest.approx(published_us["total_memcpy_time"], abs=0.01)
    with (DECODE / "MoE_unfused_fwd.csv").open(encoding="utf-8") as file:
        products = list(csv.DictReader(file))
    assert phases["expert_gemm"]["kernels"] == sum(int(row["name_count"]) for row in products) == 48
    time_us = sum(float(next(row[key] for key in row if key.endswith("_sum"))) for row in products)
    assert phases["expert_gemm"]["us"] == pytest.approx(time_us, abs=0.01)


@pytest.mark.parametrize("path", ODD, ids=lambda path: path.name)
def test_nothing_recognised_is_said_and_is_no_fault(command: Command, path: Path) -> None:
    """Exit 0, a sentence, and no phase that is not there."""
    result = command(path, "--json")
    assert result.code == 0
    assert not any(MOE_PHASES & set(phases) for phases in result.document["phases"].values())
    assert any("no MoE phase recognised" in warning for warning in result.document["warnings"])
    assert "no MoE phase recognised" in command(path).out.replace("\n", " ")


def test_a_folder_of_unrelated_traces_claims_nothing(command: Command) -> None:
    """Every trace gets a rank of its own; nothing is joined, aligned or judged."""
    document = command(DATA / "kineto" / "odd", "--json").document
    assert len(document["ranks"]) == len(ODD)
    assert document["collectives"] == document["verdicts"] == []


def test_wait_matrices(command: Command) -> None:
    """Slow rows, columns and links as published."""
    path = DATA / "matrices" / "wait_matrices.json"
    cases = json.loads(path.read_text())
    matrices = command(path, "--json").document["wait_matrices"]
    assert [found["name"] for found in matrices] == list(cases)
    for found in matrices:
        published = cases[found["name"]]["published"]
        for key in ("rows", "cols", "points"):
            assert found[key] == published.get(key, []), found["name"]


def test_wait_matrix_in_an_archive(command: Command, tmp_path: Path) -> None:
    """NPZ of square arrays."""
    matrix = np.full((8, 8), 10)
    matrix[:, 5] = 500
    np.savez(tmp_path / "waits.npz", dispatch=matrix, combine=np.full((8, 8), 3.5))
    waits = command(tmp_path / "waits.npz", "--json").document["wait_matrices"]
    assert {one["name"]: one["cols"] for one in waits} == {"dispatch": [5], "combine": []}


@pytest.mark.parametrize("annotated", [False, True])
def test_several_ranks_with_phases_are_judged(command: Command, tmp_path: Path, annotated: bool) -> None:
    """The slow rank, layer and phase of made-up traces, by kernel names and by annotations."""
    traces = moe_traces(delays={(2, "expert_gemm", 1): 60.0}, annotated=annotated)
    document = command(*write_traces(tmp_path, traces), "--json").document
    assert len(document["verdicts"]) == 6
    for verdict in document["verdicts"]:
        assert (verdict["rank"], verdict["layer"], verdict["phase"]) == (2, 1, "expert_gemm")
        assert verdict["worth_ms"] == pytest.approx(0.045, rel=0.1)  # 60 us less the mean of the ranks
    dispatches = document["collectives"][::2]
    assert all(one["transfer_us"] == pytest.approx(40, abs=0.01) for one in dispatches)
    assert document["collectives"][3]["releaser"] == 2


def test_one_rank_names_nobody(command: Command, tmp_path: Path) -> None:
    """The same traces, one of them."""
    document = command(*write_traces(tmp_path, moe_traces(ranks=1)), "--json").document
    assert document["verdicts"] == []
    assert any("one rank only" in warning for warning in document["warnings"])
    assert document["phases"]["0"]["expert_gemm"]["kernels"] == 18


def test_groups_that_are_not_all_here_name_nobody(command: Command, tmp_path: Path) -> None:
    """Four of eight ranks, and the traces do not tell who shares experts."""
    traces = moe_traces(delays={(2, "expert_gemm", 1): 60.0}, world_size=8, grouped=False)
    document = command(*write_traces(tmp_path, traces), "--json").document
    assert document["verdicts"]
    assert all(verdict["rank"] is None for verdict in document["verdicts"])


@pytest.mark.parametrize("name", GLOO)
def test_recorded_durations(command: Command, name: str) -> None:
    """A real run, from nothing but an array of durations: what was injected, and nothing where nothing was.

    A delay in every layer names no layer.
    """
    injected = GLOO[name]["injected"]
    verdicts = command(DATA / "gloo_runs" / f"{name}.npz", "--json").document["verdicts"][5:]
    assert len(verdicts) == 55
    if injected is None:
        assert sum(verdict["evidence"] == "clear" for verdict in verdicts) <= 3
        return
    wanted = (injected["rank"], injected.get("layer"), injected["phase"])
    right = [(verdict["rank"], verdict["layer"], verdict["phase"]) == wanted for verdict in verdicts]
    assert sum(right) >= 0.95 * len(right)


def test_same_rank_twice_is_not_joined(command: Command, tmp_path: Path) -> None:
    """Two traces that both say rank 0 are two things."""
    paths = write_traces(tmp_path, moe_traces(ranks=1))
    (tmp_path / "again.json").write_bytes(paths[0].read_bytes())
    document = command(tmp_path, "--json").document
    assert document["ranks"] == [0, 1]
    assert document["collectives"] == []
    assert any("rank 0 is there already" in warning for warning in document["warnings"])


def test_contradicting_ends_take_back_the_verdict(command: Command, tmp_path: Path) -> None:
    """A rank that recorded other exchanges under the same places is not compared with the others.

    Rank 1's steps are of another length, as if it had sampled other steps under the same numbers.
    """
    traces = moe_traces(steps=4)
    stretched = moe_traces(steps=4, delays={(0, "attention", 0): 900.0, (0, "router", 2): 700.0})[1]
    traces[1] = {**stretched, "distributedInfo": traces[1]["distributedInfo"]}
    document = command(*write_traces(tmp_path, traces), "--json").document
    assert document["verdicts"] == []
    assert [one["rank"] for one in document["alignment"]] == [0, 2, 3]
    assert all("1" not in one["duration_us"] for one in document["collectives"])
    assert any("no verdicts" in warning for warning in document["warnings"])


class _Loads(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Anything with an address that is not a place in the page."""
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]


def test_page_is_self_contained_and_escapes(command: Command, tmp_path: Path) -> None:
    """It loads nothing, and a file's name cannot become markup."""
    directory = tmp_path / "<script>alert(1)"
    directory.mkdir()
    paths = write_traces(directory, moe_traces(delays={(2, "expert_gemm", 1): 60.0}))
    result = command(*paths, "--html", tmp_path / "out.html")
    assert result.code == 0
    page = (tmp_path / "out.html").read_text()
    parser = _Loads()
    parser.feed(page)
    assert parser.fetched == []
    assert "<script>alert" not in page
    assert "rank 2" in page


def test_perfetto_lays_ranks_on_one_clock(command: Command, tmp_path: Path) -> None:
    """Ends of one collective meet across ranks to within its release skew, whatever the files' clocks say."""
    for rank, offset in enumerate((0.0, 2e6, -1e6, 5e5)):
        shifted(DLRM / f"rank{rank}.json.gz", tmp_path, offset_us=offset, drift=0.0)
    assert command(tmp_path, "--perfetto", tmp_path / "out.perfetto").code == 0
    events = json.loads((tmp_path / "out.perfetto").read_text())["traceEvents"]
    trace = read_trace(tmp_path / "out.perfetto")
    assert trace.arrows
    assert all(one.source["args"]["releaser"] == one.source["pid"] for one in trace.arrows)
    transfers = [event for event in events if event.get("cat") == "transfer"]
    for index in range(8):
        ends = [e["ts"] + e["dur"] for e in transfers if e["args"]["index"] == index]
        assert len(ends) == 4
        assert max(ends) - min(ends) < 10
    assert min(event["ts"] for event in events if "ts" in event) == 0


def test_terminal_shows_the_same(command: Command, tmp_path: Path) -> None:
    """Headline, releasers, and what is doubtful; paths of what was written."""
    paths = write_traces(tmp_path, moe_traces(delays={(2, "expert_gemm", 1): 60.0}))
    result = command(*paths, DATA / "loads" / "olmoe_mixtral_expected.json", "--html", tmp_path / "page.html")
    assert "rank 2" in result.out.lower()
    assert "expert_gemm" in result.out
    assert "max/mean" in result.out
    assert str(tmp_path / "page.html") in result.out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.json", b""),
        ("blank.json", b" \n\n "),
        ("one_byte", b"{"),
        ("one_byte_binary", b"\x00"),
        ("binary.json", bytes(range(256)) * 20),
        ("text.txt", b"hello world\n"),
        ("unknown.json", b'{"a": 1}'),
        ("number.json", b"7"),
        ("deep.json", b"[" * 200_000),
        ("deep_trace.json", b'{"traceEvents": [{"a": ' + b"[" * 200_000),
        ("deep_args.json", b'{"schemaVersion": 1, "x": ' + b'{"a":' * 200_000),
        ("huge_number.json", b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1e400, "dur": 1}]}'),
        ("huge_integer.json", b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": ' + b"9" * 400 + b"}]}"),
        ("long_integer.json", b'{"traceEvents": [{"ts": ' + b"9" * 9_000 + b"}]}"),
        ("cut_trace.json", (DLRM / "rank0.json.gz").read_bytes()[:20_000]),
        ("cut_inside.json", gzip.decompress((DLRM / "rank0.json.gz").read_bytes())[:100_000]),
        ("not_gzip.json.gz", b"\x1f\x8b\x08rubbish"),
        ("events.json", b'{"traceEvents": 5}'),
        ("ragged.json", b"[[1, 2], [3]]"),
        ("routes.jsonl", b'{"topk_ids": [1, 2], "layer": 0}\n{"topk'),
        ("sqlite.db", b"SQLite format 3\x00" + b"\x07" * 500),
        ("cut.npz", b"PK\x03\x04" + b"\x00" * 50),
    ],
)  # fmt: skip
def test_broken_inputs_are_one_line(command: Command, tmp_path: Path, name: str, content: bytes) -> None:
    """Exit 2, nothing on standard output, one line that names the file."""
    path = tmp_path / name
    path.write_bytes(content)
    result = command(path, "--json")
    assert result.code == 2
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert result.err.startswith("moetrace: ")
    assert str(path) in result.err
    assert "expected" in result.err


def test_a_broken_trace_of_a_folder_leaves_the_others(command: Command, tmp_path: Path) -> None:
    """The good files are analysed, the broken one is the first note; alone, or named, it is refused."""
    good = tmp_path / "good.json.gz"
    good.write_bytes(sorted(DLRM.glob("*.gz"))[0].read_bytes())
    broken = tmp_path / "broken.json"
    broken.write_bytes(b'{"traceEvents": [{"ph": "X", "ts": 1')
    document = command(tmp_path, "--json").document
    assert [file["path"] for file in document["files"]] == [str(good)]
    assert document["warnings"][0].startswith(f"left out, and broken: {broken}")
    assert command(tmp_path, broken).code == 2
    good.unlink()
    result = command(tmp_path)
    assert (result.code, str(broken) in result.err) == (2, True)


def test_a_folder_that_is_not_looked_into_says_what_lies_below(command: Command, tmp_path: Path) -> None:
    """Runs one level below, or folders with files, and how to call for one of them."""
    (tmp_path / "run-1" / "store").mkdir(parents=True)
    result = command(tmp_path)
    assert result.code == 2
    assert "folders below it are not looked into" in result.err
    assert (
        f"run directories in it: run-1/: moetrace report --dir {tmp_path / 'run-1'} shows one" in result.err
    )
    result = command(DATA)
    assert result.code == 2
    assert "folders with such files: " in result.err
    assert f"moetrace analyze {DATA}/" in result.err


def test_layers_that_are_not_shown_are_said(command: Command) -> None:
    """The most uneven layers of many, and where all of them are."""
    result = command(DATA / "loads" / "esft_law_counts.json")
    assert "8 of 26 layers shown, the most uneven; --json has all" in result.out
    document = json.loads(command(DATA / "loads" / "esft_law_counts.json", "--json").out)
    assert len(document["loads"][0]["layers"]) == 26


def test_paths_that_are_not_there(command: Command, tmp_path: Path) -> None:
    """No such file, an empty folder, a folder of other things, nowhere to write."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.json").write_text('{"a": 1}')
    for arguments in (
        [tmp_path / "none.json"],
        [tmp_path / "empty"],
        [tmp_path / "other"],
        [DLRM, "--html", tmp_path],
        [DLRM, "--perfetto", tmp_path / "none" / "x.json"],
    ):
        result = command(*arguments)
        assert result.code == 2
        assert result.err.count("\n") == 1
        assert str(tmp_path) in result.err


SEEDS = [
    gzip.decompress((DATA / "kineto" / "odd" / "triton_example.json.gz").read_bytes())[-4_000:],
    gzip.decompress((DATA / "kineto" / "odd" / "begin_end_events_4pids.json.gz").read_bytes())[:4_000],
    json.dumps(moe_traces(ranks=1, steps=1, layers=1)[0]).encode(),
    (DATA / "matrices" / "wait_matrices.json").read_bytes(),
    b'{"logical_count": [[[1, 2], [3, 4]]], "rank": 0}',
    b'{"type": "meta", "num_experts": 4, "top_k": 2}\n{"type": "route", "layer": 0, "topk_ids": [1, 2]}\n',
    b"step,layer,expert,count\n0,0,0,5\n0,0,1,6\n",
    (DATA / "otlp" / "trace.json").read_bytes(),
    (DATA / "kineto" / "odd" / "triton_example.json.gz").read_bytes(),
    (DATA / "gloo_runs" / "calm_2.npz").read_bytes(),
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.sampled_from(range(len(SEEDS))),
    edits=st.lists(st.tuples(st.integers(0, 2**30), st.binary(max_size=4), st.integers(0, 6)), max_size=6),
    cut=st.none() | st.integers(0, 2**30),
)
def test_mutated_files_never_crash(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    seed: int,
    edits: list[tuple[int, bytes, int]],
    cut: int | None,
) -> None:
    """Bytes changed, put in, taken out, cut off: a document that fits its schema, or one line and exit 2."""
    data = bytearray(SEEDS[seed])
    for place, inserted, removed in edits:
        at = place % (len(data) + 1)
        data[at : at + removed] = inserted
    if cut is not None:
        del data[cut % (len(data) + 1) :]
    path = tmp_path / "mutated"
    path.write_bytes(bytes(data))
    result = Command(capsys)(path, "--json")
    if result.code == 0:
        assert result.document
    else:
        assert result.code == 2
        assert result.err.count("\n") == 1
        assert result.err.startswith("moetrace: ")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "ph": st.sampled_from(["X", "B", "E", "M", "s", 1, None]),
                "cat": st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "user_annotation", 3]),
                "name": st.sampled_from(
                    ["dispatch", "combine", "mlp", "fused_moe_kernel", "ncclDevKernel_SendRecv()",
                     "moe_layer_1", "gloo:all_to_all", "ProfilerStep#1", "k", None, 4]
                ),
                "ts": st.integers(-(2**70), 2**70) | st.floats() | st.integers(0, 100) | st.text(max_size=3),
                "dur": st.integers(-5, 50) | st.floats() | st.none(),
                "pid": st.integers(0, 2) | st.text(max_size=2) | st.lists(st.integers(), max_size=1),
                "tid": st.integers(0, 2),
                "args": st.none()
                | st.fixed_dictionaries(
                    {},
                    optional={
                        "correlation": st.integers(-2, 4) | st.text(max_size=2),
                        "stream": st.integers(0, 2),
                        "Collective name": st.sampled_from(["all_to_all", "", 5]),
                        "Process Group Ranks": st.sampled_from(["[0, 1]", "[0, 1, ...]", [0], 7]),
                        "Group size": st.integers(-5, 5),
                    },
                ),
            },
        ),
        max_size=25,
    )
)  # fmt: skip
def test_events_of_any_content_never_crash(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    """Fields of any type and size, on two ranks at once: every output can be made, or one line and exit 2."""
    for rank in (0, 1):
        document = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
        (tmp_path / f"r{rank}.json").write_text(json.dumps(document))
    outputs = ["--html", tmp_path / "o.html", "--perfetto", tmp_path / "o.trace"]
    result = Command(capsys)(tmp_path / "r0.json", tmp_path / "r1.json", "--json", *outputs)
    assert result.code in (0, 2)
    if result.code == 0:
        assert result.document["ranks"] == [0, 1]
    else:
        assert result.err.count("\n") == 1


def test_one_result_for_every_view() -> None:
    """Document and page are made of the same record and need no file."""
    analysis = analyze([DLRM])
    VALIDATOR.validate(build_result(analysis))
    assert "Collectives" in render_result(analysis)


def test_a_run_directory_is_shown_elsewhere(command: Command, tmp_path: Path) -> None:
    """A store is not read by this command; it says which one does."""
    (tmp_path / "store").mkdir()
    result = command(tmp_path)
    assert result.code == 2
    assert "moetrace report --dir" in result.err


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    """What the bar shows adds up to the files' sizes (after decompression)."""
    paths = write_traces(tmp_path, moe_traces(ranks=2))
    seen: dict[Path, int] = {}

    def told(path: Path, size: int) -> None:
        seen[path] = seen.get(path, 0) + size

    analyze(paths, progress=told)
    assert seen == {path: path.stat().st_size for path in paths}
