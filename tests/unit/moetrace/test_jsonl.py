"""One JSON line per record and a file per rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moetrace.emit.base import PlacementEmitter
from moetrace.emit.jsonl import PHASE_FIELDS, JsonlEmitter, from_json, to_json
from moetrace.record.placement import PlacementRecord
from moetrace.record.types import (
    CoactivationRow,
    ExpertRow,
    PhaseRow,
    StepRecord,
    TrafficRecord,
    ViolationRow,
    WaitRow,
)
from moetrace.self_metrics import SelfMetrics
from moetrace_schemas import SCHEMA_VERSION
from moetrace_schemas.enums import (
    CoactivationSpan,
    CountIds,
    CountKind,
    Direction,
    ForwardMode,
    Phase,
    RoutingViolation,
)
from moetrace_schemas.placement import PlacementMap, PlacementTerms

from .records import CONTEXT, step_record


def read(line: str) -> tuple[dict[str, object], StepRecord]:
    """A line as who wrote it, and the record again."""
    data = json.loads(line)
    columns = data.pop("phases")
    phases = tuple(
        PhaseRow(
            **{
                **dict(zip(PHASE_FIELDS, values, strict=True)),
                "phase": Phase(values[1]),
                "direction": Direction(values[2]),
            }
        )
        for values in zip(*(columns[name] for name in PHASE_FIELDS), strict=True)
    )
    experts = tuple(
        ExpertRow(layer=row["layer"], kind=CountKind(row["kind"]), counts=tuple(row["counts"]))
        for row in data.pop("experts")
    )
    traffic = tuple(
        TrafficRecord(**{**row, "phase": Phase(row["phase"]), "rows": tuple(row["rows"])})
        for row in data.pop("traffic")
    )
    names = ("schema_version", "run_id", "rank", "world_size", "ep_rank", "ep_size", "ep_group")
    sender = {name: data.pop(name) for name in names}
    data["forward_mode"] = ForwardMode(data["forward_mode"])
    return sender, StepRecord(phases=phases, experts=experts, traffic=traffic, **data)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    """Nothing of a record is lost on the way to the file, and each line says who wrote it."""
    emitter = JsonlEmitter(str(tmp_path / "new"), lambda: CONTEXT, SelfMetrics())
    records = [step_record(5), step_record(6, experts=(), traffic=(), phases=())]
    for record in records:
        emitter.emit(record)
    emitter.close(0)
    written = [read(line) for line in (tmp_path / "new" / "rank-00003.jsonl").read_text().splitlines()]
    assert [record for _, record in written] == records
    assert written[0][0] == {
        "schema_version": SCHEMA_VERSION,
        "run_id": "run-7",
        "rank": 3,
        "world_size": 8,
        "ep_rank": 1,
        "ep_size": 4,
        "ep_group": 2,
    }


def test_a_record_is_in_the_file_before_the_next_one(tmp_path: Path) -> None:
    """A process that is killed loses nothing that it had written."""
    emitter = JsonlEmitter(str(tmp_path), lambda: CONTEXT, SelfMetrics())
    emitter.emit(step_record())
    assert (tmp_path / "rank-00003.jsonl").read_text().endswith("}\n")
    emitter.close(0)


def test_a_second_run_appends(tmp_path: Path) -> None:
    """A restarted rank does not overwrite what it wrote before."""
    for step in (1, 2):
        emitter = JsonlEmitter(str(tmp_path), lambda: CONTEXT, SelfMetrics())
        emitter.emit(step_record(step))
        emitter.close(0)
    lines = (tmp_path / "rank-00003.jsonl").read_text().splitlines()
    assert [read(line)[1].step for line in lines] == [1, 2]


def test_the_rank_is_read_at_each_record(tmp_path: Path) -> None:
    """An adapter finds the expert-parallel position after the emitter was made."""
    context = CONTEXT
    emitter = JsonlEmitter(str(tmp_path), lambda: context, SelfMetrics())
    context = replace(CONTEXT, ep_rank=3)
    emitter.emit(step_record())
    emitter.close(0)
    assert read((tmp_path / "rank-00003.jsonl").read_text())[0]["ep_rank"] == 3


def test_success_is_counted_after_it_happened(tmp_path: Path) -> None:
    """A record that could not be written is not called exported."""
    metrics = SelfMetrics()
    emitter = JsonlEmitter(str(tmp_path), lambda: CONTEXT, metrics)
    emitter.emit(step_record())
    emitter.close(0)
    with pytest.raises(ValueError, match="closed file"):
        emitter.emit(step_record())
    assert metrics.exported == {"jsonl": 1}


def test_what_only_some_steps_have_is_left_out_of_the_others(tmp_path: Path) -> None:
    """Violations, pairs of experts and kernels' waits are keys of the steps that have them."""
    violation = ViolationRow(layer=1, violation=RoutingViolation.CONSERVATION, count=2)
    pairs = CoactivationRow(layer=1, span=CoactivationSpan.WITHIN, pairs=((0, 3, 7),))
    waits = WaitRow(phase=Phase.DISPATCH, waits=(0, 7))
    record = step_record(violations=(violation,), coactivation=(pairs,), waits=(waits,))
    document = to_json(record, CONTEXT)
    assert from_json(json.loads(json.dumps(document))).waits == (waits,)
    assert document["waits"] == [{"phase": "dispatch", "waits": (0, 7)}]
    assert document["violations"] == [{"layer": 1, "violation": "conservation", "count": 2}]
    assert document["coactivation"] == [{"layer": 1, "span": "within", "pairs": ((0, 3, 7),)}]
    assert not {"violations", "coactivation", "waits"} & to_json(step_record(), CONTEXT).keys()


def test_what_goes_to_another_group_is_not_in_the_file() -> None:
    """As on the wire: a file with a matrix of another size would not be read again."""
    other = TrafficRecord(layer=1, phase=Phase.DISPATCH, row_bytes=16, rows=(3, 4))
    own = step_record()
    document = to_json(replace(own, traffic=(*own.traffic, other)), CONTEXT)
    assert from_json(json.loads(json.dumps(document))) == own


def test_a_placement_is_a_line_of_its_own(tmp_path: Path) -> None:
    """Map, digest and terms, in front of the first step under it; it is in no count of steps."""
    metrics = SelfMetrics()
    emitter = JsonlEmitter(str(tmp_path), lambda: CONTEXT, metrics)
    assert isinstance(emitter, PlacementEmitter)
    mapping = PlacementMap(layers=(3,), physical_to_logical=((1, 0),), num_experts=2, num_ranks=2)
    terms = PlacementTerms(expert_bytes=7, window=(0, 4), count_ids=CountIds.PHYSICAL)
    emitter.emit_placement(PlacementRecord(version=2, step=5, map=mapping, terms=terms, start_unix_ns=9))
    emitter.emit(step_record(5))
    emitter.close(0)
    first, second = map(json.loads, (tmp_path / "rank-00003.jsonl").read_text().splitlines())
    assert (first["placement_version"], first["step"], first["rank"]) == (2, 5, 3)
    assert first["placement"] == {
        "ranks": 2, "experts": 2, "layers": [3], "physical_to_logical": [[1, 0]],
    }  # fmt: skip
    assert first["digest"] == mapping.digest()
    assert (first["terms"]["expert_bytes"], first["terms"]["telemetry_window"]) == (7, [0, 4])
    assert first["terms"]["count_ids"] == "physical"
    assert "phases" in second
    assert metrics.exported["jsonl"] == 1
