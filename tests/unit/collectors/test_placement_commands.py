"""Files of the placement commands: records, serving records, proposals; bad ones are one line."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from moetrace_collectors.cli import main
from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger.record_file import read_record
from moetrace_collectors.ledger.request_records import of_version, read_requests, samples_of

ESFT = str(Path(__file__).parents[2] / "data" / "loads" / "esft_law_counts.json")
RECORD: dict[str, Any] = {"ranks": 2, "physical_to_logical": [[0, 1, 2, 3]]}


def schema(name: str) -> jsonschema.Draft202012Validator:
    """A published schema, valid itself."""
    text = resources.files("moetrace_schemas.json").joinpath(name).read_text(encoding="utf-8")
    rules = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(rules)
    return jsonschema.Draft202012Validator(rules)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 3}, "4 slots on 3 ranks"),
        ({"ranks": None}, "ranks: missing"),
        ({"ranks": "2"}, "ranks='2': a whole number"),
        (
            {"physical_to_logical": [[0, 1, 2, 2.5]]},
            r"physical_to_logical\[0\]: a whole number expected, got 2.5",
        ),
        ({"physical_to_logical": 7}, r"\[layers\]\[slots\]"),
        ({"layers": "a"}, "layers: a list of whole numbers"),
        ({"layers": [1, 2]}, "2 layer numbers for 1 layers"),
        ({"version": -1}, "version=-1"),
        ({"tresholds": 1}, "tresholds is no field of a placement; known are ranks"),
        ({"telemetry_window": [5]}, "window"),
        ({"max_slowdown": "ten"}, "max_slowdown='ten'"),
        ({"weight_digests": ["x"]}, "weight_digests: name to hex digest"),
        ({"count_ids": "slot"}, "slot"),
    ],
)
def test_a_wrong_record_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """The message names file and field; the published schema refuses it too, where it can know."""
    path = tmp_path / "record.json"
    document = {**RECORD, **changes}
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=message) as error:
        read_record(path, planner=None)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_example_of_the_schema_is_read(tmp_path: Path) -> None:
    """Every field of the published schema is one that the reader knows, and the other way round."""
    from moetrace_collectors.ledger.record_file import MAP_FIELDS, OTHER_FIELDS, TERM_FIELDS

    assert set(schema("placement_record.schema.json").schema["properties"]) == {
        *MAP_FIELDS,
        *OTHER_FIELDS,
        *TERM_FIELDS,
    }
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**RECORD, "version": 4, "in_force_from_step": 9, "proposed_by": "p"}))
    found = read_record(path, planner=None)
    assert (found.version, found.in_force_from_step, found.terms.proposed_by) == (4, 9, "p")
    assert found.mapping.num_experts == 4


def test_serving_records_are_read_from_csv_and_json(tmp_path: Path) -> None:
    """Empty is not known; by version, else by time."""
    csv = tmp_path / "r.csv"
    csv.write_text("time_unix_s,placement_version,ttft_ms,tpot_ms,failed\n5,,10,,true\n,2,,4,0\n9,,,,\n")
    as_json = tmp_path / "r.json"
    as_json.write_text(
        json.dumps(
            [
                {"time_unix_s": 5, "ttft_ms": 10, "failed": True},
                {"placement_version": 2, "tpot_ms": 4, "failed": 0},
                {"time_unix_s": 9},
            ]
        )
    )
    for path in (csv, as_json):
        records = read_requests(path)
        assert len(records) == 3
        first = samples_of(of_version(records, 1, first_ns=0, last_ns=6_000_000_000))
        second = samples_of(of_version(records, 2, first_ns=8_000_000_000, last_ns=9_000_000_000))
        assert first is not None
        assert second is not None
        assert (first.failed.tolist(), first.ttft_ms.tolist()) == ([1.0], [10.0])
        assert len(second) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft_ms\n5\n", "record 0 has neither time_unix_s nor placement_version"),
        ("time_unix_s,ttft_ms\n1,-5\n", "record 0 ttft_ms='-5'"),
        ("time_unix_s,failed\n1,maybe\n", "record 0 failed='maybe'"),
        ("", "a list of records"),
    ],
)
def test_wrong_serving_records_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """Place, field and what was expected."""
    path = tmp_path / "r.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_requests(path)


def test_a_plan_of_a_replay_is_scored_in_the_shadow_as_the_replay_scored_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a dump: the same rank loads and step times, and a sentence that says what to do."""
    assert main(["replay", ESFT, "--ranks", "8", "--slots", "72", "--json"]) == 0
    text = capsys.readouterr().out
    replayed = next(plan for plan in json.loads(text)["planners"] if plan["planner"] == "eplb")
    path = tmp_path / "replay.json"
    path.write_text(text)
    arguments = ["placement", "shadow", ESFT, "--propose", str(path), "--planner", "eplb"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    schema("placement_shadow.schema.json").validate(document)
    assert document["proposed"]["predicted_step_ms"] == pytest.approx(replayed["predicted_step_ms"])
    assert document["proposed"]["rank_loads"][0] == pytest.approx(replayed["rank_loads"][0])
    assert document["migration"]["experts_copied"] == replayed["migration_copies"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert document["sentence"] in said
    assert "rank max/mean, worst layer" in said


def test_a_proposal_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another number of experts than the traffic has."""
    path = tmp_path / "small.json"
    path.write_text(json.dumps(RECORD))
    assert main(["placement", "shadow", ESFT, "--ranks", "8", "--propose", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "slots = 4" in said or "experts" in said
