"""moetrace's own files give the verdicts that the same steps give over the network."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from moetrace_collectors.errors import UsageError
from moetrace_collectors.model import RankStep
from moetrace_collectors.offline.analysis import analyze
from moetrace_collectors.offline.own_steps import read_own
from moetrace_collectors.offline.run_view import run_views
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_collectors.verdict import VerdictEngine
from moetrace_collectors.views.summarise import summarise
from moetrace_schemas import SCHEMA_VERSION
from moetrace_schemas.enums import COUNT_KIND_BY_CODE, DIRECTION_BY_CODE, PHASE_BY_CODE, Phase

RUN = SyntheticRun(slow_rank=2, slow_layer=1, slow_phase=Phase.EXPERT_GEMM)
STEPS = 8
COLUMNS = (
    "layer",
    "microbatch",
    "ordinal",
    "stream",
    "flags",
    "start_offset_ns",
    "duration_ns",
    "bytes",
    "rows",
)


def line(one: RankStep) -> dict[str, Any]:
    """A rank step as the library's file emitter writes it."""
    phases = {name: getattr(one.phases, name).tolist() for name in COLUMNS}
    phases["phase"] = [str(PHASE_BY_CODE[code]) for code in one.phases.phase.tolist()]
    phases["direction"] = [str(DIRECTION_BY_CODE[code]) for code in one.phases.direction.tolist()]
    same = ("run_id", "step", "rank", "world_size", "ep_rank", "ep_size", "ep_group", "microbatch", "cohort",
            "warmup", "placement_version", "clock", "start_unix_ns", "duration_ns")  # fmt: skip
    return {
        "schema_version": SCHEMA_VERSION,
        "forward_mode": str(one.forward_mode),
        **{name: getattr(one, name) for name in same},
        "phases": phases,
        "experts": [
            {"layer": row.layer, "kind": str(COUNT_KIND_BY_CODE[row.kind]), "counts": row.counts.tolist()}
            for row in one.experts
        ],
        "traffic": [
            {
                "layer": row.layer,
                "phase": str(PHASE_BY_CODE[row.phase]),
                "row_bytes": row.row_bytes,
                "rows": row.rows.tolist(),
            }
            for row in one.traffic
        ],
    }


def write_ranks(directory: Path, *, ranks: int = RUN.world_size) -> list[Path]:
    """One file per rank."""
    paths = []
    for rank in range(ranks):
        path = directory / f"rank-{rank:05d}.jsonl"
        path.write_text("".join(json.dumps(line(RUN.step(step)[rank])) + "\n" for step in range(STEPS)))
        paths.append(path)
    return paths


def test_a_file_reads_back_as_what_was_written(tmp_path: Path) -> None:
    """Every field and column."""
    read = read_own(write_ranks(tmp_path)[1]).rank_steps[3]
    written = RUN.step(3)[1]
    for name in (*COLUMNS, "phase", "direction"):
        assert np.array_equal(getattr(read.phases, name), getattr(written.phases, name)), name
    assert read.key == written.key
    assert [row.counts.tolist() for row in read.experts] == [row.counts.tolist() for row in written.experts]
    assert [row.rows.tolist() for row in read.traffic] == [row.rows.tolist() for row in written.traffic]


def test_verdicts_are_those_of_the_engine(tmp_path: Path) -> None:
    """Files of all ranks are joined by run and step; the named rank, layer and phase are the slow ones."""
    analysis = analyze(write_ranks(tmp_path))
    engine = VerdictEngine()
    assert analysis.verdicts == tuple(engine.judge(step) for step in analysis.joined)
    assert len(analysis.verdicts) == STEPS
    for verdict in analysis.verdicts:
        assert verdict.suspect is not None
        assert (verdict.suspect.rank, verdict.suspect.layer) == (2, 1)
        assert verdict.suspect.phase is Phase.EXPERT_GEMM
    assert set(analysis.clocks) == set(range(RUN.world_size))


def test_a_view_is_made_of_files_as_of_a_store(tmp_path: Path) -> None:
    """Overview, loads, traffic, extensions and the step to draw."""
    analysis = analyze(write_ranks(tmp_path))
    (view,) = run_views(analysis.joined, analysis.verdicts)
    assert view.overview.steps == STEPS
    assert view.overview.ranks == tuple(range(RUN.world_size))
    assert summarise(view.steps).counted_steps == STEPS
    assert view.traffic is not None
    pairs = sum(count or 0 for row in view.expert_loads[0].counts for count in row)
    assert pairs == view.accounting.pairs_by_kind["routed"]
    assert max(view.extensions, key=lambda one: one.extension_ns).rank == 2
    assert view.detail is not None
    assert {interval.rank for interval in view.detail.intervals} == set(range(RUN.world_size))


def test_missing_ranks_name_nobody(tmp_path: Path) -> None:
    """Three of four files: partial steps, no suspect, and the missing rank is listed."""
    analysis = analyze(write_ranks(tmp_path, ranks=3))
    assert all(verdict.suspect is None and verdict.missing_ranks == (3,) for verdict in analysis.verdicts)


def test_doubled_steps_count_once(tmp_path: Path) -> None:
    """A file given under two names."""
    paths = write_ranks(tmp_path)
    (tmp_path / "again.jsonl").write_bytes(paths[0].read_bytes())
    analysis = analyze([*paths, tmp_path / "again.jsonl"])
    assert analysis.verdicts == analyze(paths).verdicts
    assert f"{STEPS} rank steps that were already there are left out" in analysis.warnings


def otlp_json(step: int) -> dict[str, Any]:
    """The export request of one step in OTLP/JSON, which writes ids in hex."""
    document: dict[str, Any] = json_format.MessageToDict(request(RUN.step(step)))
    for resource in document["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in ("traceId", "spanId"):
                    span[name] = base64.b64decode(span[name]).hex()
    return document


@pytest.mark.parametrize("per_line", [True, False])
def test_otlp_json_reads_as_the_file_does(tmp_path: Path, per_line: bool) -> None:
    """One request per line, or one request spread over lines."""
    path = tmp_path / "traces.json"
    if per_line:
        path.write_text("".join(json.dumps(otlp_json(step)) + "\n" for step in range(STEPS)))
    else:
        requests = [otlp_json(step) for step in range(STEPS)]
        spans = {"resourceSpans": [one for whole in requests for one in whole["resourceSpans"]]}
        path.write_text(json.dumps(spans, indent=1))
    directory = tmp_path / "ranks"
    directory.mkdir()
    assert analyze([path]).verdicts == analyze(write_ranks(directory)).verdicts


def test_foreign_spans_are_passed_over() -> None:
    """The example of the protocol holds one, and no step of ours: said, and no fault."""
    analysis = analyze([Path(__file__).parents[2] / "data" / "otlp" / "trace.json"])
    assert not analysis.joined
    assert "1 spans of other instrumentation are passed over" in analysis.warnings[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "schema_version"),
        ({"run_id": 5}, "run_id"),
        ({"rank": 9}, "rank: number from 0 to 3"),
        ({"ep_size": 99}, "ep_size"),
        ({"forward_mode": "sideways"}, "rank step with phases in columns expected"),
        ({"phases": {}}, "rank step with phases in columns expected"),
        ({"phases": 3}, "rank step with phases in columns expected"),
        ({"experts": [{"layer": 0}]}, "rank step with phases in columns expected"),
        ({"duration_ns": 2**70}, "duration_ns"),
    ],
)
def test_broken_lines_name_line_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A line is checked as the wire is."""
    path = tmp_path / "a.jsonl"
    good = line(RUN.step(0)[0])
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n")
    with pytest.raises(UsageError, match="line 2") as failure:
        analyze([path])
    assert message in str(failure.value)


def test_clocks_of_own_files_are_aligned_by_exchange(tmp_path: Path) -> None:
    """Rank 1's clock is 2 s ahead and drifts; exchanges are paired by key, and verdicts stay."""
    paths = write_ranks(tmp_path)
    lines = [json.loads(text) for text in paths[1].read_text().splitlines()]
    first = lines[0]["start_unix_ns"]
    for record in lines:
        record["start_unix_ns"] += 2_000_000_000 + (record["start_unix_ns"] - first) * 40 // 1_000_000
    # Lines in another order, as a file put together from parts has them.
    paths[1].write_text("".join(json.dumps(record) + "\n" for record in reversed(lines)))
    analysis = analyze(paths)
    clock = analysis.clocks[1]
    assert abs(clock.offset_ns - 2_000_000_000) < 1_000_000
    true = {step: RUN.step(step)[1].start_unix_ns for step in range(STEPS)}
    for step, record in enumerate(lines):
        back = int(clock.to_reference(np.array([record["start_unix_ns"]]))[0])
        assert abs(back - true[step]) <= clock.error_ns + 1_000
    other = tmp_path / "straight"
    other.mkdir()
    straight = analyze(write_ranks(other))
    assert [v.suspect for v in analysis.verdicts] == [v.suspect for v in straight.verdicts]


def test_a_line_that_a_killed_rank_did_not_finish_is_left_out(tmp_path: Path) -> None:
    """The lines before it count, and a warning says so; a broken line with others behind it is an error."""
    lines = [json.dumps(line(one)) for one in RUN.step(0)]
    file = tmp_path / "run-7-rank-00003-0000000001.jsonl"
    file.write_text("\n".join(lines[:2]) + "\n" + lines[2][:100])
    read = read_own(file)
    assert [one.rank for one in read.rank_steps] == [0, 1]
    assert read.warnings == (f"{file}: the last line is cut short and left out",)
    file.write_text("\n".join((lines[0], lines[1][:100], lines[2])) + "\n")
    with pytest.raises(UsageError, match="line 2"):
        read_own(file)


def test_placements_in_a_file_are_no_steps(tmp_path: Path) -> None:
    """A file that begins with one is known as ours and read as if it were not there; slots are warned of."""
    (path,) = write_ranks(tmp_path, ranks=1)
    plain = read_own(path)
    placed = {
        "schema_version": SCHEMA_VERSION,
        "run_id": RUN.run_id,
        "step": 0,
        "rank": 0,
        "placement_version": 4,
        "placement": {"ranks": 1, "experts": 2, "layers": [0], "physical_to_logical": [[0, 1]]},
        "terms": {"count_ids": "logical"},
    }
    lines = path.read_text().splitlines(keepends=True)
    announced = json.dumps(placed) + "\n"
    path.write_text("".join([announced, *lines[:4], announced, *lines[4:]]))
    found = read_own(path)
    assert [one.step for one in found.rank_steps] == [one.step for one in plain.rank_steps]
    assert found.warnings == ()
    assert not [said for said in analyze([path]).warnings if "placement" in said]
    placed["terms"] = {"count_ids": "physical"}
    path.write_text("".join([json.dumps(placed) + "\n", *lines, '{"schema']))
    said = read_own(path).warnings
    assert "counts are of slots of placement version 4" in said[0]
    assert "the last line is cut short" in said[1]
